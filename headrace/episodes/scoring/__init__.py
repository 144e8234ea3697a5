"""Rewards: finished groups become scored groups.

Read `config.py`, `job.py` (one call for one group, also of functions written for TRL), `reward_scorer.py` (functions, services and judges, weighted
and added), `functions.py` (functions, and where they run: in threads, in processes, on several machines), `builtin.py` (those that come with headrace), `extract.py` (the
part of a completion that is scored, and its steps), `parts.py` (what functions, services and judges share); `workers/` (processes of
functions), `services/` (scores over HTTP), `teacher/` (log-probs of other models).
"""
