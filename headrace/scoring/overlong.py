"""Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): what comes near the longest completion there can be loses reward.

Cut off at once at full length, a sound argument that was a few tokens too long would be punished like a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from headrace.protocols import Scorer
from headrace.scoring.config import PUNISHMENT, OverlongConfig
from headrace.types import Episode, Failure, Prompt, Scored


def soft_overlong_punishment(length: int, longest: int, cache: int) -> float:
    """0 up to `longest - cache` tokens, from there down to -1 at `longest`, in proportion."""
    free = longest - cache
    return 0.0 if length <= free else max((free - length) / cache, -1.0)


class PunishedScorer:
    """The scorer inside it, and the punishment added under its name. Of an episode the longest completion counts."""

    def __init__(self, inner: Scorer, config: OverlongConfig, longest: int) -> None:
        """`longest`: tokens of a completion (rollout.max_tokens)."""
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
    """Of what is trained on. Evaluations go without: a held-out reward measures the task."""
    return PunishedScorer(scorer, config, longest) if config.cache else scorer
