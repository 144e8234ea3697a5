"""Log-probs of packed rows.

Read `forward.py` (the exact method for a model), `root.py` (the modules within whose calls it runs), `tree_attention.py` and
`varlen_tree.py` (attention over packed trees), `context.py` (tokens that are spread over ranks), `head.py` (log-probs without the logits), `routing.py` (recorded experts). The C++
kernels are autograd functions in `fused/`; `fused_model.py` puts them into a model's modules.
`resting.py` gives a trainer's memory back while an engine has its device.
"""
