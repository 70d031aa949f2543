"""Shall we reuse, and how: slots, the arbiter, and the order of the steps.

Read in this order: `plan` (the words), `slots` (who may use which slot), `arbiter`
(restore or recompute), `turn` and `trace` (one request), `orchestrator` (lookup and
prepare), `committer` (commit), `models` (who is served).
"""
