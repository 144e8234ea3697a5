"""Where the rollouts of a run are sampled and scored.

Read `source.py` (the port that the loops call) and `own_groups.py` (this process's engine, environments and scorers).
"""
