"""The engine's kernels, compiled for this machine (`native/build.py`).

python -m headrace.engine.native.kernels.build        compiles now (`make demo` and `make setup` do) and prints the result
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from headrace.core.printing import echo
from headrace.models.resolve import cache_dir
from headrace.native.build import Built, compiled

SOURCE = Path(__file__).parent / "src"


@cache
def built(instructions: str = "native", dtype: str = "bfloat16") -> Built:
    """Never raises: without kernels the engine is slower, not wrong. `instructions`: as the compiler calls a set of them.
    `dtype`: that weights and cache are stored in."""
    flags = ("-DWIDE",) if dtype == "float32" else ()
    return compiled(SOURCE / "decoder.cpp", cache_dir() / "kernels", instructions, flags)


if __name__ == "__main__":
    for dtype in ("bfloat16", "float32"):
        found = built(dtype=dtype)
        remedy = "" if found.library else "; the engine runs in PyTorch, which is slower"
        echo(f"engine kernels, {dtype}: {found.reason}{remedy}")
    sys.exit(0)
