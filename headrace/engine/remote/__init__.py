"""Engines behind HTTP.

Read `errors.py` (what can happen to a request), `connection.py` (one server: pool, token, deadlines, streams), `dialect.py` (what
differs from one kind of server to the next), `headrace.py` (the dialect of `headrace serve`), `outages.py` (a server that was away),
`remote_engine.py` (protocol `Engine`).
"""
