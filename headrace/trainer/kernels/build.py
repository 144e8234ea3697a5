"""The trainer's kernels, compiled for this machine (`native/build.py`).

python -m headrace.trainer.kernels.build        compiles now (`make demo` and `make setup` do) and prints the result
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
def built(instructions: str = "native") -> Built:
    """Never raises: without kernels the trainer is slower, not wrong. `instructions`: as the compiler calls a set of them."""
    return compiled(SOURCE / "training.cpp", cache_dir() / "kernels", instructions)


if __name__ == "__main__":
    found = built()
    echo(f"training kernels: {found.reason}" + ("" if found.library else "; PyTorch's own are used, which is slower"))
    sys.exit(0)
