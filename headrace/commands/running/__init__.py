"""Commands that start a run or talk to one while it is under way.

Read `demo_command.py` (a first run, and the recipes that ship), `pool_command.py` (the members of its fleet), `gateway_command.py` (the
rollouts that it hands out), `worker_command.py` (a process that joins it) and `rollouts_command.py` (a rollout host on its bus).
"""
