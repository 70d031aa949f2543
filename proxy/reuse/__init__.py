"""Shall we reuse, and how: slots, the arbiter, and the order of the steps.

Read in this order: `plan` (the words), `slots` (who may use which slot), `arbiter`
(restore or recompute), `orchestrator` (lookup, prepare, commit).
"""
