"""Steps of a run that are done again, from the journal.

Read `replay_command.py` (the arguments), `rerun.py` (the trainer of any step) and `replay.py` (the comparison, bit for bit); then `bundle.py`
(a step in one file, and how it is packed) and `bundle_replay.py` (doing it again elsewhere, stage by stage).
"""
