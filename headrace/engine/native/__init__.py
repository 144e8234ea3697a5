"""The native engine. Read it in this order:

forward_pass.py   the input and output of one forward pass, and the methods of a model (`Runner`)
core.py           the engine: requests in, weights in, one `step` after the other; asleep while a trainer has the device
stepping.py       one step: plan, forward pass, tokens drawn, counters and caches updated
ahead.py          a pass that is asked for before the tokens of the one before are known
sequences.py      the sequences in the engine, and the content of the next pass
scheduler.py      which sequences run and which wait; forks; blocks that sequences share
kv_cache.py       the blocks of the KV cache, the cached prefixes, and the recorded experts
state_slots.py    the states of sequences beside the blocks: whose each is, and which are kept for others
live_weights.py   the weights that serve: the base model's, and adapters'
draws.py          what a draw is asked for and what it gives: filters, masks, log-probs
sampler.py        tokens from logits, in PyTorch where the runner does not draw itself
device_draws.py   filters and draws of rows whose logits are on a GPU, without waiting for it
guides.py         the end of a completion, and constraints
model_loading.py  the engine's parts, made from a model's directory
served_how.py     the way in which a model is served, found before anything is loaded
runners/          forward passes in PyTorch: the known families, LoRA, experts, CUDA graphs; any other model
kernels/          the known families' forward pass in C++
"""
