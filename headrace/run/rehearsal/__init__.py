"""The checks before a run costs anything: no model is loaded, and nothing is written.

Read `machine.py` (cores, memory, GPUs, the directory of the run), `memory_needs.py` (the size of a model, read from its files, and the memory
of each process), `first_rows.py` (the task and the reward, tried on real rows), `preflight.py` (do the files of a model agree?) and
`words.py` (the resolved algorithm, what teachers are shown, and the page that `--dry-run` prints). `run/rehearse.py` puts them together.
"""
