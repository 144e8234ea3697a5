"""Engines behind HTTP.

Read `errors.py` (failures of a request), `connection.py` (one server: pool, token, deadlines, streams), `dialect.py`
(differences between kinds of servers), `server_kind.py` (the facts that a kind states), `dialects/` (the kinds), `outages.py` (a server that was away), `counts.py` (its statistics),
`strangers.py` (whether anybody may change it), `standstill.py` (streams that are left for an update), `remote_engine.py` (protocol `Engine`).
"""
