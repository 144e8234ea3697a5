"""The rules that the loops follow, as values and plain functions: what runs, how much of it, and how old it may become.

Read `rollout.py` (settings and requests), `rollout_session.py` (one episode as it is played), `notebook.py` (the notes of its environment), `branching.py` (alternatives from a turn), `episodes.py` (one prompt, G episodes), `staleness.py` (C1 and its proof), `buffer.py`
(tickets and slots), `partial.py` (what becomes of a rollout when new weights come).
"""
