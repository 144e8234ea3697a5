"""One part of a reward: a function, a service or a judge, with its name and weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from headrace.core.batches import Failure
from headrace.core.types import Episode, Prompt
from headrace.episodes.scoring.extract import Extractor
from headrace.episodes.scoring.job import Ask, Effort, ScoringJob, Values, transcript_of
from headrace.episodes.scoring.parts.score_log import ScoreLog
from headrace.episodes.scoring.parts.segmenting import Form, segmented
from headrace.facts.facts import ScorerAsked
from headrace.facts.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    name: str
    weight: float
    ask: Ask
    extract: Extractor = Extractor()
    segments: str = ""
    """The text that ends a step, if each step gets a score; else empty."""
    form: Form = "sum"
    what: str = "function"
    """`function`, `service` or `judge`, for messages."""
    kept: bool = False
    """Whether its scores are recorded, so that a resumed run does not ask for them again."""

    def job(self, prompt: Prompt, episodes: Sequence[Episode]) -> ScoringJob:
        talks = tuple(transcript_of(episode) for episode in episodes)
        steps = [segmented(episode, self.segments) for episode in episodes] if self.segments else []
        return ScoringJob(
            prompt=prompt.text,
            completions=tuple(self.extract(episode.last) for episode in episodes),
            completion_tokens=tuple(episode.last.tokens for episode in episodes),
            columns=prompt.columns,
            chat=prompt.chat,
            transcripts=talks if any(talks) else (),
            segments=tuple(tuple(step for turn in turns for step in turn) for turns in steps),
        )


class PartCaller:
    """Calls the parts of a run: names the wait, records what it took, and keeps the scores that cost something."""

    def __init__(self, telemetry: Telemetry | None = None, log: ScoreLog | None = None) -> None:
        self._telemetry, self._log = telemetry, log

    async def call(self, part: RewardPart, prompt: Prompt, episodes: Sequence[Episode]) -> Values:
        job = part.job(prompt, episodes)
        log = self._log if part.kept else None
        if log and (known := log.find(part.name, job)) is not None:
            return known
        values = await self._timed(part, job)
        if log:
            log.keep(part.name, job, values)
        return values

    def close(self) -> None:
        if self._log:
            self._log.close()

    async def _timed(self, part: RewardPart, job: ScoringJob) -> Values:
        telemetry, effort = self._telemetry, Effort()
        if telemetry is None:
            return await part.ask(job, effort)
        began = telemetry.clock()
        async with AsyncExitStack() as stack:
            if part.what != "function":  # a function has a deadline of its own, and its calls are many and short
                await stack.enter_async_context(telemetry.waits.named("scoring", f"the {part.what} {part.name}"))
            values = await part.ask(job, effort)
        telemetry.record(_fact(telemetry.clock(), part, values, effort, began))
        return values


def _fact(now: float, part: RewardPart, values: Values, effort: Effort, began: float) -> ScorerAsked:
    return ScorerAsked(
        t=now,
        scorer=part.name,
        what=part.what,
        completions=len(values),
        seconds=now - began,
        waited=effort.waited,
        attempts=effort.attempts,
        retries=effort.retries,
        tokens=effort.tokens,
        failures=dict(Counter(value.reason for value in values if isinstance(value, Failure))),
    )
