"""Sampling of tokens from logits, and the conditions that end a completion.

Read `sampler.py`, `filters.py`, `drawing.py`, `guides.py` (constraints), `stopping.py`.
"""
