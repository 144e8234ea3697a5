"""The planner: it runs the real pipeline with a simulated engine and trainer in virtual time, to predict throughput and lag.

Read `measure.py` (a scenario, run by the real loops with the simulated `parts/`, becomes a prediction), `sweep.py` (which settings are worth their
lag, and sentences about a prediction), `alternation.py` (engine and trainer in turns), `answer.py` (a request becomes a recommendation, with the
sizes that fit on GPUs that are planned for); `rates/` (the speeds of the parts); `command.py` (the output of `headrace plan`).
"""
