"""From the rewards of a group to training rows; no torch.

Read `algo/advantages.py` (one number per rollout), then `credit.py` (within a rollout), `training_rows.py` (an episode as rows), and
`groups.py`, which composes them.
"""
