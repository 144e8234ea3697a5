"""The simulated engine and trainer of the planner.

Read `flight.py` (a request in the engine), `forward_passes.py` (when they are done), `engine.py`, `listeners.py` (what an engine
reports), `pool.py` (many replicas), `trainer.py`, `cores.py` (what both share on one machine).
"""
