"""A day of a simulated cluster: the real controller over hundreds of engines, trainer ranks and rollout hosts, with failures at realistic rates.

The machines: read `sizing.py` (how large and how fast it is), `mishaps.py` (what goes wrong, and how often), `machines.py` (nodes, seats and
links), `cluster_engine.py` and `cluster_trainer.py` (the workers), `placing.py` (their launcher), `linked_bus.py` (a host's end of a bus),
`cluster_parts.py` (all of it in one life of the controller, and what mishaps do to it). The day: `day_checks.py` (the contracts, checked at every fact), `day_report.py` (goodput and losses), `fleet_life.py` (a process
of the controller over a fleet), `host_park.py` and `bus_life.py` (the same over a bus), `day.py` (the day, over all restarts of the controller;
`python -m headrace.testing.faultsim.cluster.day`).
"""
