"""From the call of a user to the result of a run.

Read `run.py` (one run), `lane.py` (its directory, its past and its session), `session.py` (until the last step or a signal),
`several.py` (several adapters at once), `result.py`; beside them `rehearse.py` (everything is tried before it costs anything),
`one_shot.py` (generation and evaluation without training), `callbacks.py`, `hosting.py` (which thread has the loop) and `pieces.py`
(tokens as text).
"""
