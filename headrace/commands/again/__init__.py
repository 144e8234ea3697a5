"""Steps of a run that are done again, from the journal.

Read `replay_command.py` (the arguments), `rerun.py` (the trainer of any step) and `replay.py` (the comparison, bit for bit); then `bundle.py`
(a step in one file), `bundle_export.py` (packing it), `bundle_replay.py` with `stages.py` and `updates.py` (doing it again elsewhere).
"""
