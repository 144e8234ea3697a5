"""Makes training rows from the rewards of a group, without torch.

Read `algo/advantages.py` (one number per rollout), then `credit.py` (within a rollout), `training_rows.py` (an episode as rows), and
`groups.py`, which composes them.
"""
