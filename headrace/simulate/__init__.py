"""What the planner (`headrace/plan/`), the fault simulation (`headrace/faultsim/`) and the tests are made of.

Read `virtual_time.py` (a clock that costs nothing), `distributions.py` (lengths and latencies), `codes.py` (what simulated tokens
mean), `surroundings.py` (prompts and rewards), `world.py` (the real loops joined to fakes or simulated parts), `makers.py` (nouns by
hand, for tests).
"""
