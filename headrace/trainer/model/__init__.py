"""The model that is trained.

Read `causal_lm.py` (loaded and written back), `outline.py` (a model without its values, and its files read in parts), `adapters.py` (LoRA within it, and a frozen base of few bits), `low_memory.py` (the optimizer;
bfloat16 weights, optimizer state in the host's memory).
"""
