"""The run's directory, and how a later process resumes from it.

Read `named_logs.py` (logs that an error names), `run_directory.py` (the run's directory), `checkpoints.py` (the sealed directories of weights and state), `snapshots.py` (the
controller's state), `changed_settings.py` (the settings that differ at a resume, and what
goes on then), `recovery.py` (from checkpoint and journal back to state), `storage.py` (all of it, opened together),
`resume_rules.py` (which settings may change, and what becomes then of what the run has), `contents.py` (what is in the files that they name).
"""
