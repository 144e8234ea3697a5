"""The simulated engine and trainer of the planner.

Read `flight.py` (a request in the engine), `forward_passes.py` (their timing), `engine.py`, `listeners.py` (the engine's output), `pool.py`
(several replicas), `simulated_trainer.py`, `shared_cores.py` (how both slow each other down on one machine).
"""
