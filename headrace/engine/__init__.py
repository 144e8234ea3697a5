"""Engines: prompts and weights in, completions out.

Read `config.py`, `kinds.py` (the kinds of engines and servers), `engine_problems.py` (settings that do not fit the kind), `scoring_request.py`, `streaming.py` (an update that goes live in parts),
`request_book.py` (the requests that an engine has), `native/` (the engine; its docstring has the order), `servers/` (servers that a run
starts), `remote/` (engines behind HTTP).
"""
