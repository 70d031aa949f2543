"""The block store: a process of its own, its client, and where blocks live.

Read in this order: `base` (what the rest of kvbus asks of a store); `client`,
`connection` and `wire` (how it is asked), `supervisor` and `options` (how it is found
or started); `server`, `process`, `isolation`, `serving` and `session` (the process);
`backend`, `envelope` and `slotview` (what a stored block is, and how it is moved);
`disk`; `mooncake` with `mooncake_backend`, `mooncake_writer`, `mooncake_watch`,
`segments`, `master` and `gate`; `tiers`; `opening` (which of these a store gets).
"""
