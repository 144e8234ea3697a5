"""Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): completions that come near the limit of length lose reward.

With a punishment at the limit alone, a correct argument that is a few tokens too long would be punished like a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from headrace.core.batches import Failure
from headrace.core.protocols import Scorer
from headrace.core.types import Episode, Prompt, Scored
from headrace.episodes.scoring.config import PUNISHMENT, OverlongConfig


def soft_overlong_punishment(length: int, longest: int, cache: int) -> float:
    """Returns 0 up to `longest - cache` tokens; from there it falls linearly to -1 at `longest`."""
    free = longest - cache
    return 0.0 if length <= free else max((free - length) / cache, -1.0)


class PunishedScorer:
    """Adds the punishment, under its name, to the rewards of the inner scorer. The longest completion of an episode counts."""

    def __init__(self, inner: Scorer, config: OverlongConfig, longest: int) -> None:
        """`longest`: tokens of the longest completion (rollout.max_tokens)."""
        self._inner, self._config, self._longest = inner, config, longest

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        return [self._punished(one) for one in await self._inner.score(prompt, episodes)]

    def _punished(self, one: Scored | Failure) -> Scored | Failure:
        if isinstance(one, Failure):
            return one
        length = max(len(turn.completion.tokens) for turn in one.episode.turns)
        value = soft_overlong_punishment(length, self._longest, self._config.cache)
        return replace(one, reward=one.reward + self._config.weight * value, rewards={**one.rewards, PUNISHMENT: value})

    async def close(self) -> None:
        await self._inner.close()


def punished(config: OverlongConfig, longest: int, scorer: Scorer) -> Scorer:
    """Wraps the scorer for training. Evaluations are not punished: a held-out reward measures the task."""
    return PunishedScorer(scorer, config, longest) if config.cache else scorer
