"""The simulated machines of a cluster, and the processes on them.

Read `sizing.py` (how large and how fast it is), `mishaps.py` (what goes wrong, and how often), `machines.py` (nodes, seats and links),
`cluster_engine.py` and `cluster_trainer.py` (the workers), `placing.py` (their launcher), `linked_bus.py` (a host's end of a bus),
`cluster_parts.py` (all of it in one life of the controller, and what mishaps do to it).
"""
