"""The real loops in virtual time, over simulated parts: for the planner (`commands/plan/`), the fault simulation and the tests.

Read `virtual_time.py` (a clock that costs nothing), `surroundings.py` (prompts, rewards, lengths and latencies) and `world.py` (one process of
a run).
"""
