"""Measures the held-out reward: the same prompts before, during and after training, with the same engine and scorer."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Literal

from headrace.core.batches import Failure
from headrace.core.types import Prompt, Scored
from headrace.facts.facts import Evaluated
from headrace.facts.telemetry import Telemetry
from headrace.loop.group_source import GroupSource
from headrace.loop.outcomes import Firsts, FirstTexts


class Evaluator:
    def __init__(
        self,
        *,
        groups: GroupSource,
        prompts: Sequence[Prompt],
        telemetry: Telemetry,
    ) -> None:
        self._groups, self._prompts, self._telemetry = groups, prompts, telemetry
        self._firsts = Firsts(telemetry.record, telemetry.clock, held_out=True)
        self._texts = FirstTexts(telemetry.record, telemetry.clock)
        self._numbers = itertools.count()
        """Numbers the measurements, because two may run at the same time."""

    async def measure(self, phase: Literal["before", "during", "after"], step: int) -> Evaluated | None:
        """Measures all held-out prompts; None if the run has none. A failed rollout is counted by reason, not scored as zero."""
        if not self._prompts:
            return None
        clock = self._telemetry.clock
        started, number = clock(), next(self._numbers)
        results = await asyncio.gather(*(self._one(number, i, prompt) for i, prompt in enumerate(self._prompts)))
        scored = [one for group in results for one in group if isinstance(one, Scored)]
        failures = [one for group in results for one in group if isinstance(one, Failure)]
        # The standard error is over prompts, because samples of one prompt are not independent.
        means = [_mean([one.reward for one in group if isinstance(one, Scored)]) for group in results]
        kept = [mean for mean in means if not math.isnan(mean)]
        fact = Evaluated(
            t=clock(),
            phase=phase,
            step=step,
            prompts=len(kept),
            reward_mean=_mean(kept),
            reward_sem=_standard_error(kept),
            length_mean=_mean([one.episode.sampled for one in scored]),
            failures=dict(Counter(one.reason for one in failures)),
            seconds=clock() - started,
            asked=len(self._prompts),
            kinds=dict(Counter(one.kind for one in failures)),
            truncated=sum(one.episode.truncated for one in scored),
        )
        self._telemetry.record(fact)
        return fact

    async def _one(self, number: int, index: int, prompt: Prompt) -> list[Scored | Failure]:
        group = await self._groups.held_out(number, index, prompt, partial(self._texts.report, prompt))
        self._firsts.report(group.failures, prompt.id)
        return [*group.scored, *group.failures]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.dist(values, [mean] * len(values)) / math.sqrt((len(values) - 1) * len(values))
