"""A model's forward pass in PyTorch: the known families, and any other through Hugging Face's own.

Read `skeleton.py` (a model without weights, and new weights), `weight_places.py` and `families.py` (the parts of models that are ours, and which models those are), `pages.py`, `page_kernels.py` and `page_trial.py` (a kernel that reads the cache on GPUs), `attention.py`,
`graphs.py` (captured passes), `paged.py` (what all runners share), `layers.py` (products, experts,
LoRA), `adapter_tensors.py` (adapters as peft saves them), `fp8.py` and `fp8_kernels.py` (products in eight bits on GPUs), `decoder.py` (the known families), `recorded.py` (experts chosen in transformers' layers) and `hugging_face.py`. Then those that only their own cache serves: `module_weights.py`, `module_adapters.py` (LoRA beside layers of transformers), `cache_rows.py` (caches
of several sequences as one), `states.py` (what was computed, and for whom), `model_call.py` and `own_cache.py`.
"""
