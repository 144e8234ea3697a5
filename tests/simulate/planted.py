"""`python tests/simulate/planted.py`: does the simulation find the mistakes of `planted_faults.py`? After how many schedules, by which check?

Each is made in a copy of the package, in a temporary directory; a process of its own runs schedules there until one fails.

    python tests/simulate/planted.py                          # all of them; prints a table of which check said it, and when
    python tests/simulate/planted.py no_window --count 1000   # this one, in so many schedules
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from planted_faults import BY_PART, PLANTED, Edit, Planted

from headrace.testing.faultsim.case import Case

PACKAGE = Path(__file__).resolve().parents[2] / "headrace"
SCHEDULES = 1500

_HUNT = """
import json, sys, headrace, msgspec
from headrace.testing.faultsim.case import Case, case_of
from headrace.testing.faultsim.fuzz import problem_of
assert headrace.__file__.startswith(sys.argv[1]), headrace.__file__
cases = map(case_of, range(*json.loads(sys.argv[2]))) if sys.argv[2].startswith("[") else [msgspec.json.decode(sys.argv[2], type=Case)]
for number, case in enumerate(cases, 1):
    if problem := problem_of(case):
        print(json.dumps([number, problem]))
        break
"""


_HUNT_DAYS = """
import json, sys, headrace
from headrace.testing.faultsim.cluster.day import run_day
from headrace.testing.faultsim.cluster.sizing import ClusterSize
assert headrace.__file__.startswith(sys.argv[1]), headrace.__file__
for number, seed in enumerate(range(*json.loads(sys.argv[2])), 1):
    try:
        run_day(ClusterSize().on(96), 2.0, seed, 300.0)
    except Exception as error:
        print(json.dumps([number, f"{type(error).__name__}: {error}"]))
        break
"""


@dataclass(frozen=True)
class Hunt:
    planted: Planted
    schedule: int | None
    """The number of the first that failed, from 1 on; None where none did."""
    problem: str = ""

    @property
    def check(self) -> str:
        """Who said it."""
        kind, _, said = self.problem.partition(": ")
        if kind != "AssertionError":
            return kind
        named = re.match(r"(\w+): ", said)  # by the simulation; else by the code itself
        return named[1] if named else "assert"

    @property
    def line(self) -> str:
        one, at = self.planted, "**not found**" if self.schedule is None else str(self.schedule)
        part = next(part for part, planted in BY_PART.items() if one in planted)
        return f"| {one.name} | {part} | {one.contract} | {one.mistake} | {self.check} | {at} |"


def edited(planted: Planted, package: Path) -> dict[Path, ast.Module]:
    """Returns the tree of each changed file. Raises `AssertionError` where the code has moved away from the table."""
    trees: dict[Path, ast.Module] = {}
    for edit in planted.edits:
        path = _place(planted, edit, package, trees)
        assert _replace(_function(trees[path], edit.function), edit, plant=True) == 1
    return {path: ast.fix_missing_locations(tree) for path, tree in trees.items()}


def apply(planted: Planted, package: Path) -> list[Path]:
    """Returns the changed files. Raises `AssertionError` where the code has moved away from the table."""
    trees = edited(planted, package)
    for path, tree in trees.items():
        path.write_text(ast.unparse(tree))
    return list(trees)


@functools.cache
def _texts(package: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(package.rglob("*.py"))}


def _place(planted: Planted, edit: Edit, package: Path, trees: dict[Path, ast.Module]) -> Path:
    """The one file that has the edit's old statement, once, in a function of this name."""
    words, found = edit.function.split("."), []
    for path, text in _texts(package).items():
        if all(f"def {word}(" in text or f"class {word}" in text for word in words):
            tree = trees.get(path) or _parsed(text)
            if (function := _function(tree, edit.function)) and (times := _replace(function, edit)):
                found += [path] * times
    assert len(found) == 1, f"{planted.name}: {edit.function} has this {len(found)} times instead of once:\n{edit.old}"
    (path,) = found
    if path not in trees:
        trees[path] = ast.parse(path.read_text())  # to be changed
    return path


@functools.cache
def _parsed(text: str) -> ast.Module:
    """A tree in which edits are looked for, and which nobody changes."""
    return ast.parse(text)


def _function(scope: ast.AST, qualified: str) -> ast.AST | None:
    """The function or class of this name, wherever in the scope it is defined."""
    name, _, rest = qualified.partition(".")
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop(0)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo += ast.iter_child_nodes(node)
        elif node.name == name:
            return _function(node, rest) if rest else node
    return None


def _replace(function: ast.AST | None, edit: Edit, *, plant: bool = False) -> int:
    """How often the function has what the edit replaces; where `plant` is set, that is replaced."""
    assert function
    try:
        old, new = (ast.parse(text, mode="eval").body for text in (edit.old, edit.new))
    except SyntaxError:
        return _replace_statements(function, edit, plant)
    times, wanted = 0, ast.dump(old)

    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            nonlocal times
            if type(node) is not type(old) or ast.dump(node) != wanted:
                return self.generic_visit(node)
            times += 1
            return new if plant else node

    Replacing().visit(function)
    return times


def _replace_statements(function: ast.AST, edit: Edit, plant: bool) -> int:
    old, new = ast.parse(edit.old).body, ast.parse(edit.new).body
    found = [
        (block, start)
        for node in ast.walk(function)
        for block in vars(node).values()
        if isinstance(block, list)
        for start in range(len(block) - len(old) + 1)
        if all(map(_says, block[start : start + len(old)], old))
    ]
    for block, start in found if plant else ():
        bodies = [block[start + number].body for number, wanted in enumerate(old) if _is_open(wanted)]
        for node in filter(_is_open, new):
            node.body = bodies.pop(0)  # type: ignore[attr-defined]
        block[start : start + len(old)] = new or [ast.Pass()] * (len(block) == len(old))
    return len(found)


def _is_open(node: ast.AST) -> bool:
    """Whether any body will do: the statement's own is `...`."""
    match getattr(node, "body", None):
        case [ast.Expr(value=ast.Constant(value=value))]:
            return value is ...
    return False


def _says(node: ast.AST | str, wanted: ast.stmt) -> bool:
    if type(node) is not type(wanted):
        return False
    if _is_open(wanted):
        node, wanted = copy.copy(node), copy.copy(wanted)
        node.body = wanted.body = []  # type: ignore[attr-defined]
    return ast.dump(node) == ast.dump(wanted)


def hunt(planted: Planted, schedules: range | Case = range(SCHEDULES)) -> Hunt:
    """Runs these, or one case, on a copy with the mistake until one fails."""
    return _hunt(planted, _HUNT, schedules if isinstance(schedules, Case) else [schedules.start, schedules.stop])


def hunt_days(planted: Planted, seeds: range = range(4)) -> Hunt:
    """Runs days of a small cluster on a copy with the mistake until one fails."""
    return _hunt(planted, _HUNT_DAYS, [seeds.start, seeds.stop])


def _hunt(planted: Planted, script: str, told: object) -> Hunt:
    with tempfile.TemporaryDirectory() as name:
        # With compiled files, so that the process imports quickly, but for those that are edited: one of an edit in the same second and
        # of the same size would be taken for the original's.
        package = shutil.copytree(PACKAGE, Path(name) / "headrace", ignore=shutil.ignore_patterns("*.so"))
        for path in apply(planted, package):
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        command = [sys.executable, "-W", "ignore", "-c", script, str(Path(name).resolve())]
        environment = {**os.environ, "PYTHONPATH": str(Path(name).resolve())}
        done = subprocess.run(
            [*command, msgspec.json.encode(told).decode()], capture_output=True, text=True, env=environment, cwd=name
        )
    assert done.returncode == 0, done.stderr
    return Hunt(planted, *(json.loads(done.stdout) if done.stdout else (None, "")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--count", type=int, default=SCHEDULES)
    told = parser.parse_args()
    chosen = [one for one in PLANTED if not told.names or one.name in told.names]
    print("| name | part | breaks | mistake | said by | schedule |\n|---|---|---|---|---|---|")
    hunts = []
    for planted in chosen:
        hunts.append(hunt(planted, range(told.count)))
        print(hunts[-1].line, flush=True)
        print(f"  {planted.name}: {hunts[-1].problem[:300]}", file=sys.stderr, flush=True)
    missed = [one.planted.name for one in hunts if one.schedule is None]
    print(
        f"\n{len(hunts) - len(missed)} of {len(hunts)} were found within {told.count} schedules each; not: {missed or 'none'}"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
