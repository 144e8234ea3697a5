"""One base model that several clients train at the same time, each an adapter of its own.

Read `calls.py` (settings, and what a client's program asks for) and `shared_trainer.py` (the adapters with their optimizers and versions; examples
as microbatches).
"""
