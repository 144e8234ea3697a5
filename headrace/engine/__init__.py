"""Engines: prompts and weights in, completions out.

Read `config.py`, `sizes.py` (how much an engine takes of its device), `kinds.py` (the kinds of engines and servers), `own_families.py` (models whose forward pass is ours), `engine_problems.py` (settings that do not fit the kind), `request_book.py` (the
requests that an engine has, and one that samples nothing), `streaming.py` (an update that goes live in parts), `native/` (the engine; its
docstring has the order), `servers/` (servers that a run starts), `remote/` (engines behind HTTP), `fleet/` (several as one).
"""
