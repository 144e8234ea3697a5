"""Engines behind HTTP.

Read `errors.py` (failures of a request), `connection.py` (one server: pool, token, deadlines, streams), `dialect.py`
(differences between kinds of servers), `headrace.py` (the dialect of `headrace serve`), `vllm_facts.py` (facts about a vLLM
server), `vllm.py` (its dialect), `sglang_facts.py` and `sglang.py` (the same for SGLang), `outages.py` (a server that was away),
`counts.py` (its statistics), `standstill.py` (streams that are left for an update), `remote_engine.py` (protocol `Engine`).
"""
