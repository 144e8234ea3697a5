"""`headrace serve MODEL`: the native engine behind HTTP.

Read `config.py`, `serving.py` (the engine as the routes see it: requests, weights, counters), then the path of a request: `web/application.py`
(permission), `sampling.py` (a body, from `web/bodies.py`, becomes requests of the engine), `following.py` (completions in progress)
and `routes/`. `app.py` puts them together, and `start.py` runs them; bodies, refusals and answers that
all servers share are in `web/`. `training/` lets clients train adapters of the model.
"""
