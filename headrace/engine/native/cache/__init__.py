"""The blocks of the KV cache: whose they are, what they hold of which weights, and what was noted beside them.

Read `blocks.py`, `prefixes.py`, `routing.py`.
"""
