"""How fast kvbus is, beside what one has without it.

`python -m benchmarks` runs all of them; each is a module of its own as well, with
`--quick` for a short look and `--json FILE`. Rules:
1. Real parts: real runners, a real `kvbus serve`, a real store.
2. A figure is a ratio or a difference within one run, beside its baseline; the two
   take turns, so that whatever else the machine does falls on both.
3. Medians with their spread. A goal that is missed is said to be missed.
"""
