"""Deterministic simulation testing: the real controller with seeded faults, in virtual time.

Read `case.py` (one simulated run as a value), `lives.py` (the run, killed and resumed until it ends), `faults.py` (what goes wrong, the
disk included), `chance.py` with `engine_worker.py`, `trainer_worker.py` and `scorer.py` (the simulated workers), `checks.py` and
`oracles.py` (the contracts, and what they are compared with), `fuzz.py` (many cases).
"""
