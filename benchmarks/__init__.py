"""Measurements. Most are scripts (`python benchmarks/NAME.py`); the queue for a machine with a GPU is a package (`make device`)."""
