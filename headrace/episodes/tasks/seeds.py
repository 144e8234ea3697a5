"""Prompts without a question: each has a seed, from which an environment makes its own first message, such as a game's first position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.types import Prompt
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.prompts import Encoder, PromptMaker, checked_cursor, digest_of, seed_from, take


class SeedsTask:
    """Draws `train/<index>` for ever, with the column `seed`. All rollouts of a group have the same seed, so that they begin alike
    and their rewards can be compared.

    Held-out seeds are odd and the others even, so that no held-out one is ever drawn."""

    def __init__(self, config: TaskConfig, seed: int, encoder: Encoder) -> None:
        self._seed, self._next = seed, 0
        self._source = digest_of(["seeds", str(seed)])
        self._maker = PromptMaker(config, encoder)
        self._held = [self._prompt(f"held-out/{i}", seed_from("held-out", i) | 1) for i in range(config.held_out)]

    def draw(self) -> Prompt:
        index, self._next = self._next, self._next + 1
        return self._prompt(f"train/{index}", seed_from("train", self._seed, index) & ~1)

    def held_out(self, count: int) -> list[Prompt]:
        return take(self._held, count)

    def remarks(self) -> list[str]:
        return self._maker.remarks()

    def state(self) -> dict[str, Any]:
        return {"next": self._next, "source": self._source}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = int(checked_cursor(state, self._source)["next"])

    def _prompt(self, id: str, seed: int) -> Prompt:
        return self._maker.make(id, f"seed {seed}", {"seed": seed})
