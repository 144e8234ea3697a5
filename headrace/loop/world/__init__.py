"""The common parts of the planner (`headrace/plan/`), the fault simulation (`headrace/faultsim/`) and the tests.

Read `virtual_time.py` (a clock that costs nothing), `distributions.py` (lengths and latencies), `codes.py` (the codes in
simulated tokens), `surroundings.py` (prompts and rewards), `world.py` (the real loops with fakes or simulated parts), `makers.py` (values
for tests).
"""
