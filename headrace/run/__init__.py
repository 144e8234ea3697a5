"""A run: its processes, loops and directory, and how they are assembled.

Read `loops/` (the controller's concurrent loops; begin with its `pipeline.py`), `workers/` (the processes of engine and trainer),
`store/` (the run's directory, checkpoints and recovery), `clients/` (the ports `Engine` and `Trainer` over workers) and `assembly.py` (joins
these into a pipeline, for runs, simulations and tests). Then read `build.py` (makes the parts from a config) with `loop_plan.py`,
`planned_loops.py`,
`starting.py`, `seats.py`, `user_sites.py`, `pools.py`, `needs.py`, `teaching.py`, `python_inputs.py`, `choosing.py` and `wording.py`, and `runs/` (from the user's call to the result).
"""
