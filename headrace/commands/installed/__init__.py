"""The machine, and what is installed on it.

Read `doctor_command.py` (the arguments of `headrace doctor`), `doctor.py` (the installation), `cluster_check.py` (the machines of a run, and
the directories that they share), `parity.py` (engine against trainer) and `completion_command.py` (the script with which a shell completes a line).
"""
