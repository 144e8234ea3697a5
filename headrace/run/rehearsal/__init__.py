"""The checks before a run costs anything: no model is loaded, and nothing is written.

Read `machine.py` (cores, memory, GPUs), `shape.py` (the size of a model, read from its files), `memory_needs.py` (the memory of each
process), `prompt_lengths.py` and `reward.py` and `episode.py` (the task and the reward, tried on real rows), `place.py` (the directory of the run),
`preflight.py` (do the files of a model agree?), `two_columns.py` (a row as the model and as the reward see it),
`words.py` (the resolved algorithm, and the page that `--dry-run` prints). `run/rehearse.py` puts them together.
"""
