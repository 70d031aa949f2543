"""What the engine speaks: its HTTP client, its slot files, its processes.

Read in this order: `client` (HTTP), `state` (the sequence-state file), `slot_files`
(the files that slots are saved to and restored from), `fingerprint`, `gguf_facts`,
`runner` (one llama-server and all that is known of it), `server` (the process that
is started for an embedded runner).
"""
