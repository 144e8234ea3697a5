"""The simulated engine and trainer of the planner.

Read `engine.py` (requests, forward passes, listeners, and how engine and trainer slow each other down on one machine), `pool.py` (several
replicas) and `simulated_trainer.py`.
"""
