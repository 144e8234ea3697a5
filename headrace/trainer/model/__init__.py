"""What is trained. Read `causal_lm.py` (a model loaded and written back), `adapters.py` (LoRA within it), `quantise.py` (a frozen
base of few bits), `low_memory.py` (bfloat16 weights, optimizer state in the host's memory).
"""
