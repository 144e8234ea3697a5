"""Engines behind HTTP.

Read `errors.py` (failures of a request), `connection.py` (one server: pool, token, deadlines, streams), `dialect.py`
(differences between kinds of servers), `headrace.py` (the dialect of `headrace serve`), `outages.py` (a server that was away),
`remote_engine.py` (protocol `Engine`).
"""
