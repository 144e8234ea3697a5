"""The schedule: which sequences run, which wait, and the content of the next forward pass.

Read `sequences.py`, `passes.py`, `scheduler.py`, `waiting.py`, `sharing.py`, `forks.py`, `lifetimes.py`.
"""
