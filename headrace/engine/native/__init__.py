"""The native engine. Read it in this order:

forward_pass.py  the input and output of one forward pass, and the methods of a model (`Runner`)
core.py          the engine: requests in, weights in, one `step` after the other
stepping.py      one step: plan, forward pass, tokens drawn, books brought up to date
schedule/        who runs, who waits, and what the next pass holds
cache/           the blocks of the KV cache, the prefixes that are kept, who may share them
sampling/        from logits to tokens: filters, draws, masks; when a completion ends
runners/         forward passes in PyTorch: the known families, LoRA, experts, CUDA graphs; any other model
kernels/         the known families' forward pass in C++
parts.py, requests.py and served.py hold what `core.py` is made of.
"""
