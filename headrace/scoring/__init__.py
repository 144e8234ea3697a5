"""Rewards: finished groups become scored groups.

Read `config.py`, `job.py` (one call for one group), `functions.py` (several reward functions, weighted), `builtin.py`, `unit_tests.py`, `extract.py`,
`trl.py`, `python_rewards.py` and `overlong.py`; `workers/` (where functions run), `teacher/` (log-probs of other models). `fake.py` is the
scorer without functions.
"""
