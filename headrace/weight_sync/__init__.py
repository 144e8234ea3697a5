"""Carries weights from the trainer to engines.

Read `packed.py` (the buffer that every transport fills, and its fingerprint), `transport.py` (the table of transports),
`shared_memory.py` (both ends of one), `files.py` and `safe_files.py` (another, for engines behind HTTP), `directory.py`
(weights that never change, read from a model's directory, and adapters that peft saved).
"""
