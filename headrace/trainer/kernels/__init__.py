"""The operations of a training pass on a CPU, in C++: products over packed weights, norms, gated activations, rotary
embeddings, attention over packed trees, each with its gradient.

`src/` is compiled once for the machine it runs on and needs nothing but a C++ compiler. `binding.py` compiles and loads it,
`forward/fused/` makes autograd functions of it, `forward/fused_model.py` puts these into a Hugging Face model.
"""
