"""Log-probs of packed rows.

Read `forward.py` (which way is exact for a model), `root.py` (within which modules' calls it runs), `tree_attention.py` and `varlen.py` (attention over packed trees), `head.py`
(log-probs without the logits), `routing.py` (recorded experts), `fused_ops.py` and `fused_model.py` (the C++ kernels as autograd
functions, and in a model's modules).
"""
