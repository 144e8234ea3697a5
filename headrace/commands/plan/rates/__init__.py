"""The speeds of engine and trainer. Read `rates.py` (the values), then the three sources: `calibrate.py` (measured on this machine; new weights in `publish_times.py`),
`from_run.py` (metrics of a run), `hardware.py` (data sheets of accelerators, with known models in `shapes.py`, the ranks of a trainer in `mesh.py`, or in a pipeline in `bubble.py`, and new weights on their way in
`travel.py`); `fits.py` has the least-squares fits.
"""
