"""What is found out before a run costs anything: no model is loaded, nothing is written.

Read `machine.py` (what there is), `shape.py` (what a model is, by its files), `memory.py` (what each process will take),
`prompt_lengths.py` and `reward.py` (the task and the reward, tried on real rows), `place.py` (where the run will lie), `words.py` (the
algorithm as it comes out, and the page that `--dry-run` prints). `orchestration/runs/rehearse.py` puts them together.
"""
