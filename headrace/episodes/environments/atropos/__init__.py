"""Environments of Atropos (`environment.kind = "atropos"`): they draw their own problems, sample from the run, and post groups that they have scored.

Read `trajectory_bodies.py` (what they send), `open_rollouts.py` (the rollouts that they may play: which ticket a request belongs to),
`posted_groups.py` (the rollouts whose tokens a posted group has), then `trainer_facts.py` and the routes: `inference_routes.py` (what they sample from) and
`trajectory_routes.py` (the trajectory API, to which they post). `atropos_environment.py` joins them.
"""
