"""The block store: a process of its own, its client, and where blocks live.

Read in this order: `base` (what the rest of kvbus asks of a store), `client` and
`wire` (how it is asked), `server` (the process), `envelope` (what a stored block
looks like), `mooncake` and `disk` (where it lives), `isolation` (who can reach it).
"""
