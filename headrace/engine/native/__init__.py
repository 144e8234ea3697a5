"""The native engine. Read it in this order:

forward_pass.py  the input and output of one forward pass, and the methods of a model (`Runner`)
core.py          the engine: requests in, weights in, one `step` after the other
requested_details.py  top log-probs, masks and log-probs of the prompt, for requests that ask for them
stepping.py      one step: plan, forward pass, tokens drawn, counters and caches updated
schedule/        which sequences run, which wait, and the content of the next pass
cache/           the blocks of the KV cache, the cached prefixes, and the sharing of both
sampling/        tokens from logits: filters, draws, masks; the end of a completion
runners/         forward passes in PyTorch: the known families, LoRA, experts, CUDA graphs; any other model
kernels/         the known families' forward pass in C++
compiling.py     requests whose constraint is compiled first
sleeping.py      its memory given back while a trainer has the device
servable.py, requests.py and served.py hold what `core.py` is made of.
"""
