"""The engine's kernels, compiled for this machine (`native/build.py`).

python -m headrace.engine.native.kernels.build        compiles now (`make setup` does) and says what came of it
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from headrace.models.resolve import cache_dir
from headrace.native.build import Built, compiled

SOURCE = Path(__file__).parent / "src"


@cache
def built(instructions: str = "native") -> Built:
    """Never raises: without kernels the engine is slower, not wrong. `instructions`: as the compiler calls a set of them."""
    return compiled(SOURCE / "decoder.cpp", cache_dir() / "kernels", instructions)


if __name__ == "__main__":
    found = built()
    print(
        f"engine kernels: {found.reason}" + ("" if found.library else "; the engine runs in PyTorch, which is slower")
    )
    sys.exit(0)
