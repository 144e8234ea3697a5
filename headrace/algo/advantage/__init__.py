"""From the rewards of a group to training rows; no torch.

Read `algo/advantages.py` (one number a rollout), then `credit.py` (within a rollout), `rows.py` (an episode as a row), `groups.py` (all of it).
"""
