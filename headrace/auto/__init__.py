"""What a run leaves to us is measured: dtype, kernels or PyTorch, threads; and how much of a recipe fits into its minutes.

Read `candidates.py` (what can be chosen, and the choice among measured figures), `slices.py` and `probe.py` (a piece of the model,
timed in a process of its own), `measurer.py` (the figures, kept in the cache), `share.py` (what other processes leave of the cores),
`fit.py` (steps, groups and evaluations for so many minutes) and `allowance.py`
(which of them still fit while the run goes on). `orchestration/choosing.py` makes settings of all this, which a run writes down.
"""
