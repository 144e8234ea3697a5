"""What a run keeps on the disk, and how a later process goes on from it.

Read `run_directory.py` (the run's directory), `checkpoints.py` (the sealed directories of weights and state), `snapshots.py` (the
controller's state), `recovery.py` (journal and checkpoint become state again), `storage.py` (all of it, opened together),
`resume_rules.py` (which settings may change).
"""
