"""From logits to tokens, and when a completion ends.

Read `sampler.py`, `filters.py`, `drawing.py`, `details.py`, `stopping.py`.
"""
