"""The places where rollouts of a run are sampled and scored: in its own process, or by rollout hosts on a bus.

Read `group_source.py` (the port that the loops call), `own_groups.py` (this process's engine, environments and scorers) and `suspects.py` (tickets
that end the processes that work on them). Then, for a run with a bus, `errands.py` (the messages), `host_list.py` (the hosts that are there), `desk.py` (the run's end), `bus_groups.py` (the port over it) and `rollout_host.py` (the other end, which
works with `own_groups.py`).
"""
