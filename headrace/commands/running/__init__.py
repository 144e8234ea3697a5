"""Commands that talk to a run while it is under way, or to the machines that it will be on.

Read `pool_command.py` (the members of its fleet), `gateway_command.py` (the rollouts that it hands out), `worker_command.py` (a process
that joins it) and `cluster_check.py` (the nodes of its Ray cluster).
"""
