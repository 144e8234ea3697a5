"""Guides of an engine beside a library that fails in the middle."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.types import Constraint
from headrace.engine.native.guides import Guides

VOCABULARY = 16


class Panic(BaseException):
    """What Rust raises: no `Exception`."""


class ScriptedMatcher:
    """Allows every token. Fails as it is told."""

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def _may(self, call: str) -> None:
        if self._fails == call:
            raise Panic(f"in {call}")

    def consume_token(self, token: int) -> None:
        self._may("consume_token")

    def compute_bitmask(self) -> bytes:
        self._may("compute_bitmask")
        return b"\xff" * (VOCABULARY // 8)

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return True


class ScriptedGrammars:
    def matcher(self, constraint: Constraint) -> ScriptedMatcher:
        return ScriptedMatcher(constraint.text)


def guides() -> Guides:
    made: Any = ScriptedGrammars
    return Guides(made, None, VOCABULARY, frozenset({1}))


def test_a_failure_while_a_token_is_read_is_the_problem_of_its_sequence_alone() -> None:
    of = guides()
    bad, good = (of.begin(Constraint("regex", text), ()).result() for text in ("consume_token", ""))
    of.advance([(bad, 3), (good, 3)])
    of.wait()
    assert bad.allowed is None and "llguidance fail: Panic('in consume_token')" in bad.problem
    assert good.problem == "" and good.allowed and good.allowed.count == VOCABULARY


def test_a_failure_at_the_beginning_is_a_problem_and_with_a_prefix_a_refusal() -> None:
    of = guides()
    assert "in compute_bitmask" in of.begin(Constraint("regex", "compute_bitmask"), ()).result().problem
    with pytest.raises(ValueError, match="the 2 tokens before do not fit the constraint: .*in consume_token"):
        of.begin(Constraint("regex", "consume_token"), (3, 4)).result()
