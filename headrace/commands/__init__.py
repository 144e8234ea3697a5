"""The commands of `cli.py` other than training and evaluation: a file for each.

Read `finding.py` (the run that a name means), `status.py` (the state of a run), `inspect.py` (its rollouts), `rerun.py` and `replay.py` (repeating steps from the journal),
`diff.py` and `diff_view.py` (the first differences of two runs), `parity.py` and `parity_table.py` (engine against trainer), `serve.py`
(the engine behind HTTP), `board_command.py` (all runs in the browser), `doctor.py` (the installation) and `running/` (commands that start a run or talk to one).
"""
