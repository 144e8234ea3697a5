"""Steps of a run that are done again, from the journal.

Read `replay_command.py` (the arguments), `rerun.py` (the trainer of any step) and `replay.py` (the comparison, bit for bit).
"""
