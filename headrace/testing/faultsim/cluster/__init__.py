"""A day of a simulated cluster: the real controller over hundreds of engines, trainer ranks and rollout hosts, with failures at realistic rates.

Read `hardware/` (the machines), `day_checks.py` (the contracts, checked at every fact), `day_report.py` (goodput and losses), `fleet_life.py` (a process
of the controller over a fleet), `host_park.py` and `bus_life.py` (the same over a bus), `day.py` (the day, over all restarts of the controller;
`python -m headrace.faultsim.cluster.day`).
"""
