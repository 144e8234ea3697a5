"""Log-probs of packed rows.

Read `forward.py` (the exact method for a model, within the calls of its modules), `tree_attention.py` (attention over packed trees), `context.py`
(tokens that are spread over ranks), `carried.py` (trees through layers that keep a state), `image_places.py` (images with places on three axes in these trees), `head.py` (log-probs without the logits), `divergence.py` (a teacher's whole distributions beside them), `routing.py` (recorded experts), `lowered.py` (weights as autocast lowers them),
`compiled.py` and `flex.py` (layers and attention as torch.compile writes them, on GPUs). The C++ kernels are autograd
functions in `fused/`; `fused_model.py` puts them into a model's modules.
"""
