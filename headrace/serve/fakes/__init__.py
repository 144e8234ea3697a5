"""Servers that speak as others do, over an engine of headrace, for tests of what speaks to those. Each refuses whatever the other would not
understand. Read `vllm.py`, `sglang.py`.
"""
