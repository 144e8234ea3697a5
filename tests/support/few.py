"""Of many cases that show the same kind of fault, some run in every suite, and all of them in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], keep: int) -> list[Any]:
    """Returns all cases for `pytest.mark.parametrize`, of which `keep` are not slow: evenly spread, the first one among them. Those of several
    arguments are made by `pytest.param`."""
    every = list(cases)
    usual = [place for place, case in enumerate(every) if not _is_slow(case)]
    kept = {usual[len(usual) * number // keep] for number in range(min(keep, len(usual)))}
    return [case if place in kept else _slow(case) for place, case in enumerate(every)]


def _is_slow(case: Any) -> bool:
    return isinstance(case, type(pytest.param())) and any(mark.name == "slow" for mark in case.marks)


def _slow(case: Any) -> Any:
    if _is_slow(case):
        return case
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(case, marks=pytest.mark.slow)
