"""Commands that show runs, from their files: while a run trains, and after it.

Read `show_commands.py` (the arguments, and `headrace preflight`), `status.py` (the state of a run), `inspect.py` (its rollouts), `diff.py` (the first differences of two
runs), and `compare.py` (the runs of a directory, and runs side by side).
"""
