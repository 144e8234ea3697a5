"""A task without data or tokenizer, for tests and simulations: an endless stream of short prompts of small tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.types import Prompt


@dataclass
class FakeTask:
    """Draws `train/0`, `train/1`, ...: the same prompts for the same seed."""

    seed: int = 0
    longest: int = 4
    """The largest number of tokens of a prompt."""

    def __post_init__(self) -> None:
        self._next = 0

    def draw(self) -> Prompt:
        self._next += 1
        return self._prompt("train", self._next - 1)

    def held_out(self, count: int) -> list[Prompt]:
        return [self._prompt("held-out", index) for index in range(count)]

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]

    def _prompt(self, stream: str, index: int) -> Prompt:
        rng = random.Random(f"{self.seed}/{stream}/{index}")
        tokens = tuple(rng.randrange(1, 100) for _ in range(rng.randint(1, self.longest)))
        return Prompt(f"{stream}/{index}", " ".join(map(str, tokens)), tokens, {"answer": str(sum(tokens))})
