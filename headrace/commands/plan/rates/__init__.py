"""The speeds of engine and trainer. Read `rates.py` (the values, and what a step moves), then the three sources: `calibrate.py` (measured on this
machine), `from_run.py` (metrics of a run), `hardware.py` (data sheets of accelerators, with known models in `shapes.py` and the ranks of a
trainer, on their mesh or in a pipeline, in `mesh.py`; what headrace measured on one goes before them, `own_runs.py`). `from_run.py` has the least-squares fits.
"""
