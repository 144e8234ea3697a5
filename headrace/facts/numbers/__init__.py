"""The numbers of a run, computed from its facts alone.

Read `state.py` (everything that is counted) and its parts: `tickets.py`, `fates.py` (the outcomes of groups), `engine_use.py`,
`shares.py` (failed, cut off, without contrast), `scorers.py` (the parts of the reward) and `choices.py` (the bias of a curriculum);
`step_totals.py` (sums over all steps and versions), `measures.py` (rates and means), `progress.py` (the values of `on_step`) and `rollout_view.py` (single rollouts, from the journal)
with `turn_view.py` (their turns).
"""
