"""`headrace serve MODEL`: the native engine behind HTTP.

Read `config.py`, `serving.py` (the engine as the routes see it: requests, weights, what is counted), `errors.py` (refusals and
their status), then what a request goes through: `guard.py` (who may ask), `bodies.py` (what may be asked), `sampling.py` (a body
becomes requests of the engine), `following.py` (completions on their way), `text.py` (tokens become text), `sending.py` (answers and
streams; a client that leaves), and `routes/`. `app.py` puts them together, and `start.py` runs them.
`fake_vllm.py` is for tests: vLLM's routes over the same engine.
"""
