"""The pages of the Python interface have every public name, with the signature that Python knows."""

from __future__ import annotations

import inspect
from functools import cache

import headrace
from docs import python_reference

pages = cache(python_reference.pages)


def test_every_public_name_has_its_docstring_and_its_place():
    assert python_reference.undocumented() == []
    start = pages()[python_reference.START]
    assert [name for name in headrace.__all__ if name != "__version__" and f"\n## {name}\n" not in start] == []
    assert "\n### RunResult.export\n" in start and "### RunResult._" not in start


def test_a_signature_has_every_argument():
    start = pages()[python_reference.START]
    for function in (headrace.train, headrace.evaluate, headrace.export, headrace.open):
        shown = start.partition(f"\ndef {function.__name__}(")[2].partition("```")[0]
        assert [name for name in inspect.signature(function).parameters if f"{name}: " not in shown] == []
    assert "on_step: Callable[[Step], object] | None = None,\n" in start


def test_examples_and_indented_lines_are_code_and_angles_are_text():
    made = python_reference.prose("Returns a < b.\n\n    one\n    two\n\n>>> 1 < 2\nTrue\n\n`a<b` and <c>")
    assert made == "Returns a &lt; b.\n\n```text\none\ntwo\n```\n\n```pycon\n>>> 1 < 2\nTrue\n```\n\n`a<b` and &lt;c>"


def test_fields_stand_in_a_table_with_the_docstring_beneath_them():
    assert "| `max_tokens` | `int` | `64` | 0 samples nothing:" in pages()["api/types.md"]
    assert (
        "`tuple[int, ...]`" in pages()["api/types.md"]
        and "listener: Callable[[StepOutput], None]" in pages()["api/ports.md"]
    )
