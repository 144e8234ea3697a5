"""Commands that start a run or talk to one while it is under way.

Read `demo_command.py` (a first run, and the recipes that ship) and `running_commands.py` (the members of a fleet, rollouts that a run hands out, and
processes that join it).
"""
