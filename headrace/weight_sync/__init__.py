"""How weights reach an engine.

Read `memory.py` (shared memory without a name), `shared_memory.py` (both ends of it), `directory.py` (weights that never change).
"""
