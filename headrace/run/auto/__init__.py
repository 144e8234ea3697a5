"""Settings that are left to headrace are chosen by measurement: dtype, kernels or PyTorch, threads; by the memory of a GPU: the sizes of what
runs there; and how much of a recipe fits into its minutes.

Read `candidates.py` (what can be chosen, and the choice among measured figures), `slices.py` and `probe.py` (a piece of the model, timed in a
separate process), `measurer.py` (the figures, kept in the cache, and the cores that other processes leave free), `gpu_sizes.py` (what
fits on a GPU), `gpu_rates.py` and `gpu_probe.py` (what is worth its memory there) and `fit.py` (steps, groups and evaluations that fit into a number of minutes). `run/choosing.py` turns the results into settings, which the run records.
"""
