"""Who runs, who waits, and what the next forward pass holds.

Read `sequences.py`, `passes.py`, `scheduler.py`, `waiting.py`, `sharing.py`, `forks.py`, `lifetimes.py`.
"""
