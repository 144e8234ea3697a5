"""Servers that speak as others do, over an engine of headrace, for tests of what speaks to those. Each refuses whatever the other would not
understand. Read `fake_vllm.py`, `runtime_checksums.py` (of its weights), `fake_transfer.py` (weights that it fetches),
`fake_sleep.py` (its memory), `sglang_bodies.py`, `fake_sglang.py`.
"""
