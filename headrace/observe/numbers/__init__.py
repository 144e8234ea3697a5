"""Numbers of a run, computed from its facts and from nothing else.

Read `state.py` (all that is counted), with `tickets.py`, `fates.py` (what became of groups), `engine_use.py` and `shares.py` (failed,
cut off, without contrast) beneath it; `measures.py` (rates and means), `lags.py`, `progress.py` (the values of `on_step`) and
`rollout_view.py` (sampled rollouts, from the journal).
"""
