"""The machine, and what is installed on it.

Read `installed_commands.py` (the arguments of `headrace doctor` and `completion`), `doctor.py` (the installation), `cluster_check.py` (the machines of a run, and
the directories that they share), `parity.py` (engine against trainer).
"""
