"""Rollouts of a run that are sampled and scored by rollout hosts on a bus.

Read `bus/` (queues, notices, who is there), `bus_messages.py`, `bus_run.py` (the run's end, the hosts that are there, and the port of the
loops over it) and `rollout_host.py` (the other end, which works with `loop/own_groups.py`). `user_host.py` is another kind of worker:
it runs only the user's code.
"""
