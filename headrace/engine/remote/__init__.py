"""Engines behind HTTP.

Read `connection.py` (one server: pool, token, deadlines, streams, failures), `dialect.py` (differences between kinds of servers, and what
servers that label their weights have in common), `server_kind.py` (the facts that a kind states, and whether strangers may change a server), `dialects/` (the kinds),
`outages.py` (a server that was away), `remote_engine.py` (protocol `Engine`, a run's own counts, and streams that are left for an update), `sleeping_server.py`
(one that takes turns with the trainer).
"""
