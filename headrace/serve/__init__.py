"""`headrace serve MODEL`: the native engine behind HTTP.

Read `config.py`, `serving.py` (the engine as the routes see it: requests, weights, counters), `errors.py` (refusals and
their status), then the path of a request: `guard.py` (permission), `bodies.py` (bodies of requests), `sampling.py` (a body
becomes requests of the engine), `following.py` (completions in progress), `text.py` (tokens become text), `sending.py` (answers and
streams; a client that leaves), and `routes/`. `app.py` puts them together, and `start.py` runs them.
`training/` lets clients train adapters of the model. `fakes/` is for tests: the routes of other servers over the same engine.
"""
