"""kvbus: one KV cache for every Ollama / llama.cpp process.

Read in the order in which a request travels: `cli`, `config`, `app` (start-up), then
`ollama` (what clients speak), `reuse` (which runner, which slot, reuse or recompute),
`prefix` (tokens and block keys), `store` (where KV blocks live), `llamacpp` (what
the engine speaks). `blocks` holds the words that they share.
"""

__version__ = "0.1.0"
