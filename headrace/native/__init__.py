"""The C++ code that engine and trainer share, and, on CUDA, torch's attention over ragged sequences (`varlen.py`) and logits in float32
(`logits.py`).

`build.py` calls the compiler, `memory.py` allocates memory on large pages, `free_memory.py` and `cores.py` count what of the machine is available, and
`arithmetic.py` names the forward passes that both compute alike. `src/` holds the shared headers: vector types (`vec.h`, `wide.h`), products
(`product.h`, with one file for each kind of processor), formulas (`formulas.h`, `routing.h`), attention over a block (`look.h`) and the
team of threads that runs them (`team.h`).
"""
