"""Log-probs of packed rows.

Read `forward.py` (which way is exact for a model), `root.py` (within which modules' calls it runs), `tree_attention.py` and `varlen.py`
(attention over packed trees), `head.py` (log-probs without the logits), `routing.py` (recorded experts). The C++ kernels are autograd
functions in `fused_products.py`, `fused_ops.py` (what stands between products) and `fused_served.py` (passes as the engine makes them);
`fused_model.py` puts them into a model's modules.
"""
