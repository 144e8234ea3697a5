"""Commands that talk to a run while it is under way.

Read `pool_command.py` (the members of its fleet), `gateway_command.py` (the rollouts that it hands out) and `worker_command.py` (a process
that joins it).
"""
