"""The search for changes, compiled for this machine (`native/build.py`).

python -m headrace.weight_sync.delta.build        compiles now (`make demo` and `make setup` do) and prints the result
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
def built() -> Built:
    """Never raises: without a compiler numpy does the same more slowly."""
    return compiled(SOURCE / "delta.cpp", cache_dir() / "kernels")


if __name__ == "__main__":
    found = built()
    echo(f"delta of weights: {found.reason}" + ("" if found.library else "; numpy is used, which is slower"))
    sys.exit(0)
