"""The speeds of engine and trainer. Read `rates.py` (the values), then the three sources: `calibrate.py` (measured on this machine),
`from_run.py` (metrics of a run), `hardware.py` (data sheets of accelerators) with `travel.py` (new weights on
their way); `fits.py` has the least-squares fits.
"""
