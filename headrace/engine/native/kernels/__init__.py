"""The decoder in C++: a forward pass as one job of a team of threads, over weights packed for the CPU's matrix unit.

`src/` is compiled once for the machine it runs on and needs nothing but a C++ compiler; without one the engine runs the same models in
PyTorch (`runners/decoder.py`).

Read `binding.py` (how `src/` is compiled and called), `runner.py` (the `Runner`; weights as the kernels want them, and hidden states
to compare with a trainer's), `drawing.py` (tokens from its logits).
"""
