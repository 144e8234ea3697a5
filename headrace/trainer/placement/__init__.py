"""The placement of weights, and of the work of a step, on devices and processes.

Read `port.py` (all that the rest of the trainer asks of it), `single.py` (one device), `simulated.py` (the fake: ranks that are threads of
one process, each of which holds some rows of every parameter).
"""
