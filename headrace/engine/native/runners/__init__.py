"""A model's forward pass in PyTorch: the known families, and any other through Hugging Face's own.

Read `families.py`, `skeleton.py`, `weight_tensors.py`, `decoder.py` with `attention.py`, `paged.py`, `padding.py`, `linear.py` and `experts.py`,
then `low_rank.py`, `cuda_graphs.py` and `hugging_face.py`.
"""
