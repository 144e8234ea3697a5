"""One base model that several clients train at the same time, each an adapter of its own.

Read `calls.py` (what a client's program asks for), `shared_trainer.py` (the adapters with their optimizers and versions), `packs.py` (examples as
microbatches), `config.py` (settings).
"""
