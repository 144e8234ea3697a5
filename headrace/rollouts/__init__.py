"""The rules that the loops follow, as values and plain functions: what runs, how much of it, and how old it may become.

Read `rollout.py` (one prompt, G rollouts), `staleness.py` (C1 and its proof), `buffer.py` (tickets and slots), `partial.py`
(what becomes of a rollout when new weights come).
"""
