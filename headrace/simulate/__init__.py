"""What the planner (`headrace/plan/`) and the fault simulation (`headrace/faultsim/`) are both made of.

Read `virtual_time.py` (a clock that costs nothing), `distributions.py` (lengths and latencies), `codes.py` (what simulated tokens
mean), `surroundings.py` (prompts and rewards), `world.py` (the real loops
joined to fakes or simulated parts), `makers.py` (requests and updates, for tests).
"""
