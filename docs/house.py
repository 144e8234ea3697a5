"""Prints the figures of the table in `docs/decisions/0030-rooms.md`: `python docs/house.py [CHECKOUT]`. Counted is what git tracks below `headrace/`, without `testing/`."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path


def main(root: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "headrace/*.py"], cwd=root, check=True, capture_output=True, text=True)
    files = [Path(name) for name in tracked.stdout.split() if not name.startswith("headrace/testing/")]
    modules = [file for file in files if file.name != "__init__.py"]
    lines = {file: len((root / file).read_text().splitlines()) for file in files}
    own = [lines[module] for module in modules]
    words = Counter(word for module in modules for word in set(re.findall(r"[a-z]+|[0-9]+", module.stem)))
    rooms = {file.parts[1] for file in files if len(file.parts) > 2}
    print(f"rooms (folders on the top level)  {len(rooms)}")
    print(f"files  {len(files)}")
    print(f"modules (without __init__)  {len(modules)}")
    print(f"lines  {sum(lines.values()):,}")
    print(f"lines of a module, mean and median  {statistics.mean(own):.0f}, {statistics.median(own):.0f}")
    print(
        f"modules below 50, below 100, above 300 lines  {_below(own, 50)}, {_below(own, 100)}, {sum(n > 300 for n in own)}"
    )
    print(f"words in file names, and those that occur once  {len(words)}, {sum(n == 1 for n in words.values())}")
    print(f"functions that take the whole config  {sum(_takers(root / module) for module in files)}")


def _below(lines: list[int], limit: int) -> int:
    return sum(count < limit for count in lines)


def _takers(file: Path) -> int:
    """Functions with a parameter whose type names `RunConfig`, as `tests/test_layout.py` counts them."""
    count = 0
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            count += any(arg.annotation and re.search(r"\bRunConfig\b", ast.unparse(arg.annotation)) for arg in given)
    return count


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent)
