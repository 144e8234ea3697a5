"""Deterministic simulation testing: the real controller with seeded faults, in virtual time.

Read `case.py` (one simulated run as a value), `lives.py` (the run, killed and resumed until it ends), `faults.py` (the faults, those of
the disk included), `chance.py` with `engine_worker.py`, `trainer_worker.py` and `scorer.py` (the simulated workers), `checks.py` and
`oracles.py` (the checks of the contracts, and their reference values), `chosen_anew.py` (the reference of the prompts that are chosen), `kept_notes.py` (what environments
keep),
`fuzz.py` (many cases). `cluster/` has a day of a cluster of a thousand GPUs.
"""
