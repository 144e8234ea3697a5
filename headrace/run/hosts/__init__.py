"""Rollouts of a run that are sampled and scored by rollout hosts on a bus.

Read `bus/` (queues, notices, who is there), `errands.py` (the messages), `host_list.py` (the hosts that are there), `desk.py` (the run's
end), `bus_groups.py` (the port of the loops over it) and `rollout_host.py` (the other end, which works with `loop/own_groups.py`).
`user_hosts/` has workers that run only the user's code.
"""
