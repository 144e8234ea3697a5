"""Commands that show runs, from their files: while a run trains, and after it.

Read `looking_commands.py` (the arguments), `status.py` (the state of a run), `inspect.py` (its rollouts), `diff.py` and `diff_view.py` (the
first differences of two runs), `run_table.py` (the runs of a directory) `compare.py` (runs side by side) and `preflight_command.py` (the files of a model).
"""
