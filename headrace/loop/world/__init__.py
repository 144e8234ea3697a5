"""The real loops in virtual time, over simulated parts: for the planner (`commands/plan/`), the fault simulation and the tests.

Read `virtual_time.py` (a clock that costs nothing), `distributions.py` (lengths and latencies), `codes.py` (the codes in
simulated tokens), `surroundings.py` (prompts and rewards) and `world.py` (one process of a run).
"""
