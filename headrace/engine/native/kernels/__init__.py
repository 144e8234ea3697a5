"""The decoder in C++: a forward pass as one job of a team of threads, over weights packed for the CPU's matrix unit.

`src/` is compiled once for the machine it runs on (`build.py`) and needs nothing but a C++ compiler; without one the engine
runs the same models in PyTorch (`decoder.py`). `binding.py` mirrors its structs, `runner.py` is the `Runner`.

Read `binding.py`, `packing.py` (weights as the kernels want them), `runner.py`, `stream.py` (hidden states, to compare with a
trainer's), `build.py`.
"""
