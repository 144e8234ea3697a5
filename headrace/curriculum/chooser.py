"""Chooses the prompt of every draw among candidates.

A choice depends on the seed, the ticket, the cursor of the task and the journal's records before the draw, in their order. The ledger
counts a record here as soon as it is written, and recovery counts the same records again. So a run that is killed anywhere and resumed
repeats its choices; a checkpoint only saves reading the journal from its start.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from msgspec.structs import replace

from headrace.curriculum.beliefs import Belief, PromptPool, resting, sampled_contrast
from headrace.curriculum.config import CurriculumConfig
from headrace.curriculum.observations import Observation, RewardScale, agreeing, observation_of
from headrace.curriculum.source import Curriculum, CurriculumState, TaskOrder
from headrace.durable.journal import AnyRecord
from headrace.protocols import Task
from headrace.reports import PromptChoice
from headrace.types import Prompt

NEW = Belief()


def open_curriculum(task: Task, config: CurriculumConfig, seed: int, group_size: int) -> Curriculum:
    """`group_size`: rollouts of a group."""
    return Chooser(task, config, seed, group_size) if config.chooses else TaskOrder(task)


def key_of(prompt: Prompt) -> int:
    """The name under which a prompt is remembered: a 64-bit hash of its tokens. A collision among 50,000 has a chance of 1 in 10^10."""
    return int(xxhash.xxh3_64_intdigest(np.asarray(prompt.tokens, "<i8").tobytes()))


class Chooser:
    """Takes one of some candidates, which come in the order of the task (`curriculum.kind`)."""

    def __init__(self, task: Task, config: CurriculumConfig, seed: int, group_size: int) -> None:
        self.task = task
        self._config, self._seed, self._size = config, seed, group_size
        self._beliefs: dict[int, Belief] = {}
        """The belief of each key, the one that was not drawn for longest first."""
        self._flying: dict[int, int] = {}
        """Key by ticket."""
        self._hand: tuple[Prompt, ...] = ()
        """Candidates that were never drawn. They wait for the next draw, so that no prompt is passed over before it was tried."""
        self._next = 0
        """The ticket after the last one drawn: the time by which beliefs age."""
        self._scale = RewardScale()

    def draw(self, ticket: int) -> tuple[Prompt, PromptChoice | None]:
        busy = set(self._flying.values())
        if self._config.kind == "pools":
            looked = self._until_awake(ticket, busy)
            place = min(range(len(looked)), key=lambda i: self._sleepiness(looked[i], ticket, busy))
        else:
            looked = [*self._hand, *(self.task.draw() for _ in range(self._config.candidates - len(self._hand)))]
            chance = random.Random(f"{self._seed}/curriculum/{ticket}")
            ranks = [self._rank(prompt, ticket, busy, chance) for prompt in looked]
            place = max(range(len(looked)), key=ranks.__getitem__)
        prompt, key = looked[place], key_of(looked[place])
        choice = self._choice(key, looked)
        self._take(ticket, key)
        if self._config.kind == "contrast":
            self._hand = self._never_drawn(looked)
        return prompt, choice

    def count(self, record: AnyRecord) -> None:
        seen = observation_of(record)
        if seen and (key := self._flying.pop(seen.ticket, None)) is not None and seen.result != "unknown":
            self._scale = self._scale.after(seen)
            if belief := self._beliefs.get(key):
                self._beliefs[key] = self._updated(belief, seen)

    def state(self) -> CurriculumState | None:
        return CurriculumState(
            beliefs=tuple(self._beliefs.items()),
            flying=dict(self._flying),
            hand=self._hand,
            next_draw=self._next,
            scale=self._scale,
        )

    def restore(self, cursor: Mapping[str, Any], state: CurriculumState | None) -> None:
        self.task.restore(cursor)
        if state:
            self._beliefs, self._flying = dict(state.beliefs), dict(state.flying)
            self._hand, self._next, self._scale = state.hand, state.next_draw, state.scale

    # -- a draw ---------------------------------------------------------------------------------------------------------

    def _until_awake(self, ticket: int, busy: set[int]) -> list[Prompt]:
        """Candidates up to the first that neither rests nor is in flight."""
        looked: list[Prompt] = []
        while len(looked) < self._config.candidates:
            looked.append(prompt := self.task.draw())
            if not any(self._sleepiness(prompt, ticket, busy)):
                break
        return looked

    def _sleepiness(self, prompt: Prompt, ticket: int, busy: set[int]) -> tuple[bool, int]:
        """Whether a group of the prompt is in flight, and the draws for which the prompt still rests."""
        key = key_of(prompt)
        return key in busy, max(0, self._beliefs.get(key, NEW).due - ticket)

    def _rank(self, prompt: Prompt, ticket: int, busy: set[int], chance: random.Random) -> tuple[bool, float]:
        """Higher is better. A prompt in flight comes last, because the outcome of its group is not known yet."""
        belief = self._beliefs.get(key := key_of(prompt), NEW)
        kept = belief.kept(ticket, self._config.half_life)
        return key not in busy, sampled_contrast(belief, kept, self._size, by_group=self._scale.deceives, chance=chance)

    def _never_drawn(self, looked: Sequence[Prompt]) -> tuple[Prompt, ...]:
        kept = {key: prompt for prompt in looked if (key := key_of(prompt)) not in self._beliefs}
        return tuple(kept.values())[: self._config.candidates - 1]

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
        now, kept = self._next, before.kept(self._next, self._config.half_life)
        mixed = seen.result == "mixed"
        agreed = agreeing(seen.rewards)
        mean = sum(seen.rewards) / len(seen.rewards) if seen.rewards else before.mean
        pool = self._pool(seen, mean)
        streak = 0 if mixed else before.streak + 1
        base = self._config.rest if pool == "solved" else self._config.wait
        return Belief(
            pool=pool,
            at=now,
            agreed=kept * before.agreed + agreed,
            differed=kept * before.differed + len(seen.rewards) - agreed,
            mixed=kept * before.mixed + mixed,
            flat=kept * before.flat + (not mixed),
            streak=streak,
            due=now + resting(streak, base) if streak else 0,
            mean=mean,
            drawn=before.drawn,
        )

    def _pool(self, seen: Observation, mean: float) -> PromptPool:
        if seen.result == "flat":
            return "solved" if self._scale.solved(mean) else "hopeless"
        return "mixed" if seen.result == "mixed" else "failed"
