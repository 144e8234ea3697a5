"""HTTP, for every server here: the native engine (`serve/`), the fakes of other servers, the gateway of agents, and the board of runs.

Read `limits.py` (who can reach a server, and how many connections it holds), `errors.py` (refusals and their status), `bodies.py` (bodies of
requests), `constraints.py` (formats that are asked for), `request_fields.py` (fields that are refused, or that nobody knows), `sending.py`
(answers and streams; a client that leaves), `application.py` (routes, and who may send requests), `server.py` (a port and its server, within the limits).
`tls.py` is TLS for connections that are not HTTP. `formats/` has the formats of answers that several servers share.
"""
