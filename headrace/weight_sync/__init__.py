"""Weights from the trainer to engines.

Read `packed.py` (the buffer that every transport fills, and its fingerprint), `transport.py` (the transports there are),
`shared_memory.py` (one of them, both ends), `files.py` and `safe_files.py` (another, for engines behind HTTP), `directory.py`
(weights that never change, read from a model's directory, and adapters that peft saved).
"""
