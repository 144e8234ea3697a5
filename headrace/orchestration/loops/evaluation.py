"""Measures the held-out reward: the same prompts before, during and after training, with the same engine and scorer."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from headrace.observe.facts import Evaluated
from headrace.observe.telemetry import Telemetry
from headrace.orchestration.loops.outcomes import Firsts, FirstTexts
from headrace.playing import EnvironmentKind
from headrace.protocols import Scorer
from headrace.rollouts.episodes import roll_out, with_rewards
from headrace.rollouts.rollout import RolloutConfig, seed_of
from headrace.rollouts.rollout_session import Decode, Generate, Played, Room, TurnAsked
from headrace.settings.process_config import EvalConfig
from headrace.types import Completion, Failure, Prompt, Request, Scored


class Evaluator:
    def __init__(
        self,
        *,
        generate: Generate,
        environment: EnvironmentKind,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        config: EvalConfig,
        rollout: RolloutConfig,
        decode: Decode,
        telemetry: Telemetry,
        context_length: int,
        adapter: str = "",
    ) -> None:
        self._generate, self._environment, self._scorer, self._telemetry = generate, environment, scorer, telemetry
        self._prompts, self._config, self._rollout = prompts, config, rollout
        self._decode, self._adapter = decode, adapter
        self._room = Room(context_length, rollout.max_tokens)
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
        async def ask(asked: TurnAsked) -> Completion:
            return await self._generate(self._request(number, index, asked), asked.heard)

        seeds = [seed_of("held-out environment", index, i) for i in range(self._config.samples)]
        waits, who = self._telemetry.waits, self._environment.players
        async with (
            waits.named("evaluation", f"the engine, or {who}") if who else waits.named("evaluation", "the engine")
        ):
            rolled = await roll_out(self._environment, prompt, seeds, ask=ask, decode=self._decode, room=self._room)
        played = [one for one in rolled if isinstance(one, Played)]
        episodes = [one.episode for one in played]
        self._texts.report(prompt, episodes)
        found: list[Scored | Failure] = [one for one in rolled if isinstance(one, Failure)]
        if episodes:
            async with self._telemetry.waits.named("evaluation", "the scorer"):
                found += with_rewards(await self._scorer.score(prompt, episodes), played)
        self._firsts.report((one for one in found if isinstance(one, Failure)), prompt.id)
        return found

    def _request(self, number: int, index: int, asked: TurnAsked) -> Request:
        """Makes a request. Its seed does not depend on the step, so that before and after differ only by the weights."""
        turn = (asked.turn,) if asked.turn else ()
        name = "/".join(map(str, (number, index, asked.rollout, *turn)))
        request = self._rollout.evaluation(
            f"eval:{self._adapter}:{name}",  # adapters share an engine, so the name must be unique
            asked.context,
            seed_of("held-out", index, asked.rollout, *turn),
            self._config.temperature,
            self._adapter,
        )
        return asked.limited(request)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
