"""Rewards: finished groups become scored groups.

Read `config.py`, `job.py` (one call for one group), `reward_scorer.py` (functions, services and judges, weighted and added), `functions.py`
(functions, and where they run), `builtin.py`, `unit_tests.py`, `extract.py`, `trl.py`, `python_rewards.py` and `overlong.py`; `workers/` (processes
and threads of functions), `parts/` (what functions, services and judges share), `services/` (scores over HTTP), `teacher/` (log-probs of other
models).
"""
