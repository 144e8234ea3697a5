"""How fast engine and trainer are. Read `rates.py` (the values), then the three sources: `calibrate.py` (this machine, measured),
`from_run.py` (metrics of a run), `hardware.py` (data sheets of accelerators); `fits.py` has their least squares.
"""
