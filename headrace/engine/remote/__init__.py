"""Engines behind HTTP.

Read `errors.py` (what can happen to a request), `connection.py` (one server: pool, token, deadlines, streams), `dialect.py` (what
differs from one kind of server to the next), `headrace.py` (the dialect of `headrace serve`), `vllm_facts.py` (what a vLLM server is),
`vllm.py` (its dialect), `outages.py` (a server that was away), `standstill.py` (streams that are left for an update), `remote_engine.py`
(protocol `Engine`).
"""
