"""One file for each command of `cli.py` that is more than a run: each reads a run's directory, or this machine, and prints.

Read `status.py` (a run that goes on), `inspect.py` (its rollouts), `rerun.py` and `replay.py` (a step again, from the journal),
`diff.py` and `diff_view.py` (where two runs part), `parity.py` and `parity_table.py` (engine against trainer), `serve.py`
(the engine behind HTTP), `doctor.py` (what is installed).
"""
