"""The C++ kernels as autograd functions.

Read `fused_ops.py` (weights packed as the kernels read them, and the operations between products), `fused_products.py` (linear layers, with adapters;
passes with the engine's arithmetic), `fused_mixtures.py` (mixtures of experts; which modules are linear layers, routers and experts).
"""
