"""HTTP, for every server here: the native engine (`serve/`), the fakes of other servers, the gateway of agents, and the board of runs.

Read `limits.py`, `errors.py` (refusals and their status), `bodies.py` (bodies of requests), `unserved.py` (fields that are refused),
`constraints.py` (formats that are asked for), `unknown_fields.py` (fields that nobody knows), `sending.py` (answers and streams; a client that leaves), `guard.py` (who may send requests), `application.py` (routes behind the guard),
`crowd.py` with `limited_http.py` (limits on connections), `one_line.py` (log lines that strangers can cause), `looking.py` (files that clients
name), `server.py` (a port and its server).
`tls.py` is TLS for connections that are not HTTP. `formats/` has the formats of answers that several servers share.
"""
