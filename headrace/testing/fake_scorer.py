"""A scorer without functions, for tests and simulations: settable delay, rewards and failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.core.batches import Failure
from headrace.core.types import Episode, Prompt, Scored
from headrace.episodes.scoring.job import fail_raised


@dataclass
class FakeScorer:
    seconds: float = 0.0
    """Seconds that scoring a group takes, in `asyncio.sleep` alone, so that it works in virtual time."""
    reward: Callable[[Prompt, Episode], float] | None = None
    """The reward of a rollout, which fails if this raises. None gives each completion its own number between 0.5 and 1.5."""
    failure_rate: float = 0.0
    """The share of rollouts whose reward fails."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._scored = 0

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        await asyncio.sleep(self.seconds)
        return [self._one(prompt, episode) for episode in episodes]

    def _one(self, prompt: Prompt, episode: Episode) -> Scored | Failure:
        self._scored += 1
        rng = random.Random(f"{self.seed}/{prompt.id}/{self._scored}")
        if rng.random() < self.failure_rate:
            return Failure("reward_raised", "injected failure")
        try:
            value = self.reward(prompt, episode) if self.reward is not None else 0.5 + rng.random()
        except Exception as error:
            return fail_raised(error)
        return Scored(episode, value, {"fake": value})

    async def close(self) -> None:
        pass
