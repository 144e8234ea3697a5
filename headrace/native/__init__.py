"""The C++ code that engine and trainer share, and what both do alike on CUDA (`cuda_ops.py`).

`build.py` calls the compiler, `memory.py` allocates memory on large pages, `uploads.py` copies to a device and from it, `resources.py` counts what of the machine is available, and
`arithmetic.py` names what the bits of a result depend on. `src/` holds the shared headers: vector types (`vec.h`, `wide.h`), products
(`product.h`, with one file for each kind of processor), formulas (`formulas.h`, `routing.h`), attention over a block (`look.h`) and the
team of threads that runs them (`team.h`).
"""
