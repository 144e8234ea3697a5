"""Engines: prompts and weights in, completions out.

Read `config.py`, `kinds.py` (which engines there are), `streaming.py` (an update that goes live in parts), `native/` (the engine; its docstring has the order) and `fake.py`
(the engine without a model).
"""
