"""Runs, from the user's call to the result.

Read `run.py` (one run), `lane.py` (its directory, storage and session), `session.py` (until the last step or a signal), `several.py`
(several adapters at once), `train_call.py` (what outlives the death of a trainer) and `result.py`. Then read `rehearse.py` (checks before anything costs time), `one_shot.py` (evaluation and
export), `callbacks.py`, `rollout_hosting.py` (a process that serves another's run), `hosting.py` (the thread of the event loop) and `pieces.py` (tokens as text).
"""
