"""The planner: it runs the real pipeline with a simulated engine and trainer in virtual time, to predict throughput and lag.

Read `scenario.py` (the input of a simulation), `measure.py` (the real loops with the simulated `parts/` become a prediction), `sweep.py` (which
settings are worth their lag), `alternation.py` (engine and trainer in turns), `gpu_memory.py` (the sizes that fit on GPUs
that are planned for), `step_sizes.py` (the bytes that a step moves), `answer.py` (a request becomes a recommendation); `rates/` (the speeds of
the parts); `reasons.py`, `charts.py` and `command.py` (the output of `headrace plan`).
"""
