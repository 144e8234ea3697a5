"""Runs from outside: `beside.py`, `offered_workers.py`, `preloaded_python.py`, `processes.py`."""
