"""Chooses the prompt of every draw among candidates.

A choice depends on the ticket, the cursor of the task and the journal's records before the draw, in their order. The ledger
counts a record here as soon as it is written, and recovery counts the same records again. So a run that is killed anywhere and resumed
repeats its choices; a checkpoint only saves reading the journal from its start.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from msgspec.structs import replace

from headrace.core.protocols import Task
from headrace.core.reports import PromptChoice
from headrace.core.types import Prompt
from headrace.durable.journal import AnyRecord
from headrace.loop.curriculum.beliefs import (
    Belief,
    Level,
    PromptPool,
    expected_chance,
    observed,
    resting,
    sampled_chance,
)
from headrace.loop.curriculum.config import CurriculumConfig
from headrace.loop.curriculum.observations import Observation, RewardScale, observation_of
from headrace.loop.curriculum.source import Curriculum, CurriculumState, TaskOrder

NEW = Belief()


def open_curriculum(task: Task, config: CurriculumConfig, group_size: int) -> Curriculum:
    """`group_size`: rollouts of a group."""
    return Chooser(task, config, group_size) if config.chooses else TaskOrder(task)


def key_of(prompt: Prompt) -> int:
    """The name under which a prompt is remembered: a 64-bit hash of its tokens. A collision among 50,000 has a chance of 1 in 10^10."""
    return int(xxhash.xxh3_64_intdigest(np.asarray(prompt.tokens, "<i8").tobytes()))


class _Rank(NamedTuple):
    """The rank of a candidate: a higher one is better."""

    good: bool
    """Whether it is drawn without a look at others: never drawn before, awake, or with a chance of contrast that is large enough."""
    free: bool
    """Whether no group of it is in flight, whose outcome would be worth waiting for."""
    worth: float


class Chooser:
    """Takes the first good one of some candidates, which come in the order of the task, or else the best (`curriculum.kind`)."""

    def __init__(self, task: Task, config: CurriculumConfig, group_size: int) -> None:
        self.task = task
        self._config, self._size = config, group_size
        self._largest = group_size
        while 2 * self._largest <= config.largest_group:
            self._largest *= 2
        self._beliefs: dict[int, Belief] = {}
        """The belief of each key, the one that was not drawn for longest first."""
        self._flying: dict[int, int] = {}
        """Key by ticket."""
        self._level = Level()
        self._next = 0
        """The ticket after the last one drawn: the time by which beliefs age."""
        self._scale = RewardScale()

    def draw(self, ticket: int) -> tuple[Prompt, PromptChoice | None]:
        busy = set(self._flying.values())
        looked, ranks = list[Prompt](), list[_Rank]()
        while len(looked) < self._config.candidates and not (ranks and ranks[-1].good):
            looked.append(prompt := self.task.draw())
            ranks.append(self._rank(prompt, ticket, busy))
        place = max(range(len(looked)), key=ranks.__getitem__)
        prompt, key = looked[place], key_of(looked[place])
        choice = self._choice(key, looked)
        if self._config.largest_group:
            prompt = replace(prompt, rollouts=self._rollouts(key, ticket))
        self._take(ticket, key)
        return prompt, choice

    def count(self, record: AnyRecord) -> None:
        seen = observation_of(record)
        if seen and (key := self._flying.pop(seen.ticket, None)) is not None and seen.result != "unknown":
            self._scale = self._scale.after(seen)
            if belief := self._beliefs.get(key):
                self._beliefs[key] = self._updated(belief, seen)

    def state(self) -> CurriculumState | None:
        return CurriculumState(
            ratings=tuple(self._beliefs.items()),
            flying=dict(self._flying),
            level=self._level,
            next_draw=self._next,
            scale=self._scale,
        )

    def restore(self, cursor: Mapping[str, Any], state: CurriculumState | None) -> None:
        self.task.restore(cursor)
        if state:
            self._beliefs, self._flying = dict(state.ratings), dict(state.flying)
            self._level, self._next, self._scale = state.level, state.next_draw, state.scale

    # -- a draw ---------------------------------------------------------------------------------------------------------

    def _rank(self, prompt: Prompt, ticket: int, busy: set[int]) -> _Rank:
        belief = self._beliefs.get(key := key_of(prompt), NEW)
        free = key not in busy
        if self._config.kind == "pools":
            rest = max(0, belief.due - ticket)
            return _Rank(free and not rest, free, -float(rest))
        if not belief.drawn:
            return _Rank(free, free, 1.0)
        found = sampled_chance(
            belief,
            self._level,
            now=ticket,
            half_life=self._config.half_life,
            size=self._largest,
            by_group=self._scale.deceives,
            chance=random.Random(f"curriculum/{ticket}/{key}"),
        )
        return _Rank(free and found >= self._config.least_chance, free, found)

    def _rollouts(self, key: int, ticket: int) -> int:
        """Returns the size of a prompt's group: the smallest that is expected to have contrast, or the largest."""
        belief, size = self._beliefs.get(key, replace(NEW, at=ticket)), self._size
        if belief.pool == "failed" or self._scale.deceives:  # nothing says that a larger group would have contrast
            return size
        config = self._config
        while size < self._largest and config.least_chance > expected_chance(
            belief, self._level, now=ticket, half_life=config.half_life, size=size
        ):
            size *= 2
        return size

    def _take(self, ticket: int, key: int) -> None:
        before = self._beliefs.pop(key, replace(NEW, at=ticket))
        self._beliefs[key] = replace(before, drawn=before.drawn + 1)
        self._flying[ticket] = key
        self._next = ticket + 1
        if len(self._beliefs) > self._config.remembered:
            del self._beliefs[next(iter(self._beliefs))]

    def _choice(self, key: int, looked: Sequence[Prompt]) -> PromptChoice:
        candidates = [self._beliefs.get(key_of(prompt), NEW) for prompt in looked]
        means = [one.mean for one in candidates if math.isfinite(one.mean)]
        chosen = self._beliefs.get(key, NEW)
        return PromptChoice(
            pool=chosen.pool,
            looked=dict(Counter(one.pool for one in candidates)),
            drawn=chosen.drawn + 1,
            known=len(self._beliefs) + (not chosen.drawn),
            mean=chosen.mean,
            offered=sum(means) / len(means) if means else math.nan,
        )

    # -- what is learned ------------------------------------------------------------------------------------------------

    def _updated(self, before: Belief, seen: Observation) -> Belief:
        now, half_life, size = self._next, self._config.half_life, len(seen.rewards)
        mixed, kept = seen.result == "mixed", before.kept(self._next, half_life)
        solved = sum(map(self._scale.solved, seen.rewards))
        ease, doubt = before.ease, before.doubt_at(now, half_life)
        if size:
            logit, doubt = observed(self._level.logit + ease, doubt, solved, size)
            self._level = self._level.after(logit - self._level.logit - ease)
            ease = logit - self._level.logit
        mean = sum(seen.rewards) / size if size else before.mean
        pool = self._pool(seen, mean)
        streak = 0 if mixed else before.streak + 1
        base = self._config.rest if pool == "solved" else self._config.wait
        return Belief(
            pool=pool,
            at=now,
            ease=ease,
            doubt=doubt,
            mixed=kept * before.mixed + mixed,
            flat=kept * before.flat + (not mixed),
            fine=kept * before.fine + (mixed and solved in (0, size)),
            streak=streak,
            due=now + resting(streak, base) if streak else 0,
            mean=mean,
            drawn=before.drawn,
        )

    def _pool(self, seen: Observation, mean: float) -> PromptPool:
        if seen.result == "flat":
            return "solved" if self._scale.solved(mean) else "hopeless"
        return "mixed" if seen.result == "mixed" else "failed"
