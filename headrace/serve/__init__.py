"""`headrace serve MODEL`: the native engine behind HTTP.

Read `config.py`, `serving.py` (the engine as the routes see it: requests, weights, counters, completions in progress), then the path of a request:
`web/application.py` (permission), `sampling.py` (a body, from `web/bodies.py`, becomes requests of the engine) and `routes/`.
`start.py` puts them together and runs them; bodies, refusals and answers that all servers share are in `web/`. `training/` lets clients train adapters
of the model.
"""
