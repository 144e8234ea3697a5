"""Rewards that depend only on the prompt and the rollout's place. Some fail, some groups have no contrast, some take long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.faultsim.chance import Chance
from headrace.rollouts.rollout import seed_of
from headrace.types import Episode, Failure, Prompt, Scored

LATE = 40.0
"""Seconds: long enough for many other groups to be sampled and scored."""


class SeededScorer:
    """Protocol `Scorer`."""

    def __init__(self, seed: int, chance: Chance, stragglers: int = 0) -> None:
        """`stragglers`: every `stragglers`-th prompt takes `LATE` seconds. 0 for none."""
        self._seed, self._chance, self._stragglers = seed, chance, stragglers
        self._scale = chance.random.choice([0.0, 0.1, 2.0])
        self._calls = 0

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        number, self._calls = self._calls, self._calls + 1
        if self._chance.due("scorer_hangs", number):
            await asyncio.sleep(1e9)
        await asyncio.sleep(self._chance.seconds(self._scale) + (LATE if self._straggles(prompt) else 0.0))
        return [self._one(prompt, place, episode) for place, episode in enumerate(episodes)]

    def _straggles(self, prompt: Prompt) -> bool:
        stream, _, number = prompt.id.partition("/")
        return bool(self._stragglers) and stream == "train" and int(number) % self._stragglers == 0

    def _one(self, prompt: Prompt, place: int, episode: Episode) -> Scored | Failure:
        reward = reward_of(self._seed, prompt.id, place)
        return Failure("reward_raised", "injected") if reward is None else Scored(episode, reward, {"seeded": reward})

    async def close(self) -> None:
        pass


def reward_of(seed: int, prompt: str, place: int) -> float | None:
    draw = seed_of(seed, "reward", prompt, place) % 100
    return None if draw < 5 else float(draw % 4)
