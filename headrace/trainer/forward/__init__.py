"""Log-probs of packed rows.

Read `forward.py` (which way is exact for a model), `tree_attention.py` and `varlen.py` (attention over packed trees), `head.py`
(log-probs without the logits), `routing.py` (recorded experts), `fused_products.py`, `fused_ops.py`, `fused_served.py` and
`fused_model.py` (the C++ kernels as autograd functions: products, what stands between them, those of which only the engine has a
forward pass, and all of them in a model's modules).
"""
