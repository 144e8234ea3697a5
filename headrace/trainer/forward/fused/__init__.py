"""The C++ kernels as autograd functions.

Read `fused_weights.py` (weights packed as the kernels read them), `fused_products.py` (linear layers, with adapters),
`fused_ops.py` (the operations between products), `fused_served.py` (passes with the engine's arithmetic), `fused_mixtures.py` (mixtures of
experts), `module_layers.py` (which modules are linear layers) and `mixture_modules.py` (which are routers and experts).
"""
