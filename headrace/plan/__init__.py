"""The planner: the real pipeline against a simulated engine and trainer, in virtual time, to predict throughput and lag.

Read `scenario.py` (what is simulated), `planned.py` (the real loops joined to the simulated `parts/`), `measure.py` (one simulation
becomes a prediction), `sweep.py` (which settings are worth their lag), `answer.py` (a question becomes a recommendation); `rates/` (how
fast the parts are); `reasons.py`, `charts.py` and `command.py` (what `headrace plan` prints and draws).
"""
