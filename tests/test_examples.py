"""The examples in the docstrings of the nouns, the ports and the buffer: one case, evaluated from the first file to the last."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.core import batches, protocols, reports, steps, types, weights
from headrace.loop import buffer

READING_ORDER = (types, batches, weights, steps, reports, protocols, protocols, buffer)
PORTS_WITHOUT_A_VALUE = {
    "Agent",
    "Worker",
    "Launcher",
    "Observer",
    "WeightSender",
    "WeightReceiver",
    "EngineCore",
    "TrainerCore",
}
"""Ports that no noun flows through, and the two ends of a transport, which are shown together."""


def classes(module: ModuleType) -> Iterator[ast.ClassDef]:
    tree = ast.parse(Path(module.__file__ or "").read_text())
    yield from (node for node in tree.body if isinstance(node, ast.ClassDef))


def docstrings(module: ModuleType) -> Iterator[tuple[str, int, str]]:
    """Name, line and text of every docstring, in the order of the file."""
    tree = ast.parse(Path(module.__file__ or "").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(found, key=lambda node: node.lineno):
        if text := ast.get_docstring(node):
            yield f"{module.__name__}.{node.name}", node.lineno, text


def failures(modules: tuple[ModuleType, ...], replaced: dict[str, str] | None = None) -> list[str]:
    """Runs all examples in one namespace and returns the report of each that fails. `replaced`: texts to exchange first."""
    names: dict[str, object] = {"asyncio": asyncio}
    for module in modules:
        names |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    reported: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for module in modules:
        for name, line, text in docstrings(module):
            for old, new in (replaced or {}).items():
                text = text.replace(old, new)
            test = doctest.DocTestParser().get_doctest(text, names, name, module.__file__, line)
            runner.run(test, out=reported.append, clear_globs=False)
            names |= test.globs
    return reported


def test_every_example_is_true():
    assert "".join(failures(READING_ORDER)) == ""


@pytest.mark.parametrize(
    "false", [{"[4, 4, 5]": "[4, 5, 5]"}, {"(6, 6)": "(5, 5)"}, {"kv_version=4)  #": "kv_version=5)  #"}]
)
def test_a_false_example_is_found(false):
    assert failures(READING_ORDER, false)


def test_every_noun_has_an_example():
    without = [
        node.name
        for module in READING_ORDER
        for node in classes(module)
        if not node.name.startswith("_") and ">>>" not in (ast.get_docstring(node) or "")
    ]
    assert set(without) - {"Struct"} == PORTS_WITHOUT_A_VALUE


def test_the_reading_order_holds_every_noun():
    """No frozen struct of the ground floors lies in a file that the order leaves out."""
    ground = [importlib.import_module(f"headrace.{name}") for name in ("core.errors", "core.printing", "version")]
    assert not [node.name for module in ground for node in classes(module) if "Struct" in ast.unparse(node)]
