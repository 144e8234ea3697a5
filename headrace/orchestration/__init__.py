"""A run: its processes, its loops, its directory, and how they are put together.

Read `loops/` (what runs at once in the controller; begin with its `pipeline.py`), `workers/` (the processes of engine and trainer),
`store/` (the run's directory, checkpoints and recovery), `clients/` (the ports `Engine` and `Trainer` over workers), `assembly.py` (all
of these joined into a pipeline, for runs, simulations and tests alike), then `build.py` with `loop_plan.py`, `pools.py`, `needs.py`,
`teaching.py`, `python_inputs.py`, `choosing.py` (what settings leave open) and `wording.py` (a config becomes parts), and `runs/` (from the call of a user to the result).
"""
