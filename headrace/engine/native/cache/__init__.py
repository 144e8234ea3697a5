"""The blocks of the KV cache: their holders, their content and its weights, and the routing noted for each.

Read `blocks.py`, `prefixes.py`, `recorded_routing.py`.
"""
