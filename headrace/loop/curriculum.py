"""The choice of the prompt that is drawn next, from what the groups of each prompt have shown so far. Everything follows from the task's
order and the journal's records in theirs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from msgspec.structs import replace

from headrace.core.batches import OUTAGES
from headrace.core.protocols import Task
from headrace.core.reports import PromptChoice
from headrace.core.types import Prompt, Struct
from headrace.durable.journal import AnyRecord, GoneRecord, ReadyRecord
from headrace.loop.curriculum_config import CurriculumConfig

# --- The knowledge of a prompt, and the chance that its next group has contrast
#
# The logit of the rate at which a prompt is solved is the level of the policy plus the ease of the prompt, as in Rasch's model of tests (1960).
# Each group is an observation of that sum. It moves the ease of its prompt, and by a small share the level: so what one prompt shows is
# known of all others, and a prompt that was hopeless is tried again when the policy has become better. The uncertainty of a prompt's
# ease grows while it is not drawn, as that of a player's rating does between games (Glicko, Glickman 1999).
#
# A group of G rollouts that are solved with the probability p has contrast with the probability 1 - p^G - (1 - p)^G, the chance that dynamic
# sampling keeps it (DAPO, Yu et al. 2025, arXiv:2503.14476). A prompt is judged by one draw of p (Thompson sampling): prompts that are thought to be solved are
# tried from time to time, and the more often the less is known of them. With the expected chance instead, a run of the demo drew 27 of its
# 136 prompts in its last steps (docs/curriculum.md).
#
# A group may be larger where contrast is rare. Its size follows from the expected chance: before the first rollout is sampled, and from earlier
# groups alone. So the rollouts of a group are independent draws of one policy, and their advantages have no bias by its size, as they would if
# sampling went on until they differed.
#
# Rewards of more than two values may differ among rollouts that all are solved, or all are not. How often that happens is counted for each
# prompt. Where rewards do not show contrast (a length penalty gives equal rewards contrast), whole groups are counted.


PromptPool = Literal["new", "mixed", "solved", "hopeless", "failed"]
"""The result of the last group of a prompt: nothing yet, contrast, all rewards equal and high, all equal and low, a failure."""

DOUBT = 4.0
"""Variance of the ease of a prompt that nothing is known of, in squared logits. It is never larger."""
GROWTH = 8.0
"""Growth of that variance in one half-life of draws."""
SHARE = 0.06
"""Share of a surprise by which the level moves; the mean of all surprises at first. These three numbers fit a recorded run of the demo best
among a few (docs/curriculum.md)."""
LONGEST_REST = 5
"""Doublings of a rest at most."""
_NODES, _TALL = np.polynomial.hermite.hermgauss(15)
_WEIGHTS = _TALL / _TALL.sum()


class Belief(Struct, frozen=True, array_like=True):
    """The knowledge of one prompt."""

    pool: PromptPool = "new"
    at: int = 0
    """The draw at which the prompt was observed last."""
    ease: float = 0.0
    """Logit of its solve rate above the level of the policy."""
    doubt: float = DOUBT
    """Variance of the ease at that draw."""
    mixed: float = 0.0
    """Discounted number of groups with contrast."""
    flat: float = 0.0
    """Discounted number of groups without."""
    fine: float = 0.0
    """Discounted number of groups with contrast whose rollouts were all solved, or all not."""
    streak: int = 0
    """Groups in a row without contrast."""
    due: int = 0
    """The draw until which the prompt rests."""
    mean: float = math.nan
    """Mean reward of its last group; NaN if it has none."""
    drawn: int = 0
    """How often it was drawn."""

    def kept(self, now: int, half_life: int) -> float:
        """The weight of its counts at draw `now`."""
        return float(0.5 ** ((now - self.at) / half_life))

    def doubt_at(self, now: int, half_life: int) -> float:
        """The variance of its ease at draw `now`."""
        return min(DOUBT, self.doubt + GROWTH * (now - self.at) / half_life)


class Level(Struct, frozen=True):
    """The policy as the prompts show it."""

    logit: float = 0.0
    seen: int = 0
    """Groups that were observed."""

    def after(self, surprise: float) -> Level:
        """`surprise`: of the last group, in logits."""
        return Level(self.logit + max(SHARE, 1 / (self.seen + 2)) * surprise, self.seen + 1)


def contrast(rate: float, size: int) -> float:
    """The probability that a group of `size` rollouts has two outcomes, one of which has the probability `rate` in each rollout."""
    return float(1.0 - rate**size - (1.0 - rate) ** size)


def rate_of(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))


def observed(logit: float, doubt: float, solved: int, size: int) -> tuple[float, float]:
    """Returns mean and variance of a logit after `solved` of `size` rollouts were, by Laplace's approximation around the most probable
    value."""
    found = logit
    for _ in range(8):  # Newton's steps, which are at most 2 logits long
        rate = rate_of(found)
        slope = solved - size * rate - (found - logit) / doubt
        found += max(-2.0, min(2.0, slope / (size * rate * (1.0 - rate) + 1.0 / doubt)))
    rate = rate_of(found)
    return found, 1.0 / (size * rate * (1.0 - rate) + 1.0 / doubt)


def sampled_chance(
    belief: Belief, level: Level, *, now: int, half_life: int, size: int, by_group: bool, chance: random.Random
) -> float:
    """A draw from what is known of the chance that the next group of a prompt has contrast. `now`: the draw of the run; `by_group`: by the
    share of its earlier groups that had."""
    kept = belief.kept(now, half_life)
    if by_group or belief.pool == "failed":
        return chance.betavariate(1.0 + kept * belief.mixed, 1.0 + kept * belief.flat)
    logit = chance.gauss(level.logit + belief.ease, math.sqrt(belief.doubt_at(now, half_life)))
    return _with_fine(contrast(rate_of(logit), size), belief, kept)


def expected_chance(belief: Belief, level: Level, *, now: int, half_life: int, size: int) -> float:
    """The expectation of the chance that the next group of a prompt has contrast, by Gauss and Hermite's quadrature."""
    spread = math.sqrt(2.0 * belief.doubt_at(now, half_life))
    logits = level.logit + belief.ease + spread * _NODES
    mean = sum(w * contrast(rate_of(logit), size) for logit, w in zip(logits, _WEIGHTS, strict=True))
    return _with_fine(float(mean), belief, belief.kept(now, half_life))


def _with_fine(two: float, belief: Belief, kept: float) -> float:
    """`two`: the chance of two outcomes. Adds that of rewards which differ though all are solved, or none is."""
    fine = kept * belief.fine / (1.0 + kept * (belief.fine + belief.flat))
    return two + (1.0 - two) * fine


def resting(streak: int, base: int) -> int:
    """Draws of rest after `streak` groups in a row without contrast."""
    return base << min(streak - 1, LONGEST_REST)


# --- What a record of the journal says about the prompt of its ticket, and the range of rewards


_CANCELLED = ("overdue", "interrupted", "settings_changed")
"""Reasons that depend on when a group was generated, or under which settings, and not on its prompt."""


class Observation(Struct, frozen=True):
    """The end of a group's generation and scoring."""

    ticket: int
    result: Literal["mixed", "flat", "failed", "unknown"]
    """Whether the group had something to learn from; flat if its rewards did not differ, failed if it ended for a reason of its own, unknown
    if it was cancelled or met an outage."""
    rewards: tuple[float, ...] = ()


def observation_of(record: AnyRecord) -> Observation | None:
    """Returns None for a record that ends no group."""
    match record:
        case ReadyRecord(group=group):
            return Observation(group.ticket, "mixed", tuple(rollout.reward for rollout in group.scored))
        case GoneRecord(ticket=ticket, outcome="dropped", reason="no_contrast"):
            return Observation(ticket, "flat", record.rewards)
        case GoneRecord(ticket=ticket, reason=reason):
            own = reason not in OUTAGES and reason not in _CANCELLED
            return Observation(ticket, "failed" if own else "unknown")
    return None


class RewardScale(Struct, frozen=True):
    """The range of rewards in this run, and whether they show contrast."""

    low: float = math.inf
    high: float = -math.inf
    deceives: bool = False
    """Whether equal rewards had contrast, or different ones had none: because of a length penalty or an advantage of the user's, say."""

    def after(self, seen: Observation) -> RewardScale:
        differ = len(set(seen.rewards)) > 1
        return RewardScale(
            low=min(self.low, *seen.rewards, math.inf),
            high=max(self.high, *seen.rewards, -math.inf),
            deceives=self.deceives or (seen.result != "failed" and differ != (seen.result == "mixed")),
        )

    def solved(self, mean: float) -> bool:
        """Whether a group of equal rewards counts as solved: they lie in the upper half of all that were seen."""
        return mean > (self.low + self.high) / 2 if self.low < self.high else mean > 0


# --- The port through which the pipeline draws prompts, what a checkpoint holds of it, and the task's own order


class CurriculumState(Struct, frozen=True):
    """The part of a checkpoint beside the cursor of the task."""

    ratings: tuple[tuple[int, Belief], ...]
    """Pairs of key and belief, the one that was not drawn for longest first."""
    flying: dict[int, int]
    """The key of every ticket whose group is being generated or scored."""
    next_draw: int
    """The ticket after the last one drawn."""
    scale: RewardScale
    level: Level = Level()


class Curriculum(Protocol):
    """The source of the prompts to be trained on."""

    @property
    def task(self) -> Task: ...

    def draw(self, ticket: int) -> tuple[Prompt, PromptChoice | None]:
        """Returns the prompt of the next ticket, and how it was chosen; None if it was not."""

    def count(self, record: AnyRecord) -> None:
        """Learns from a record of the journal."""

    def state(self) -> CurriculumState | None: ...

    def restore(self, cursor: Mapping[str, Any], state: CurriculumState | None, *, same_rewards: bool = True) -> None:
        """`cursor`: of the task. `state`: None if the checkpoint is of a run that did not choose; then no prompt is known. `same_rewards`: whether rewards
        still mean what they did; if not, no prompt is known either."""


class TaskOrder:
    """Draws the task's prompts in its own order (`curriculum.kind = "uniform"`)."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def draw(self, ticket: int) -> tuple[Prompt, PromptChoice | None]:
        return self.task.draw(), None

    def count(self, record: AnyRecord) -> None:
        pass

    def state(self) -> CurriculumState | None:
        return None

    def restore(self, cursor: Mapping[str, Any], state: CurriculumState | None, *, same_rewards: bool = True) -> None:
        self.task.restore(cursor)


# --- The choice of every draw among candidates
#
# A choice depends on the ticket, the cursor of the task and the journal's records before the draw, in their order. The ledger
# counts a record here as soon as it is written, and recovery counts the same records again. So a run that is killed anywhere and resumed
# repeats its choices; a checkpoint only saves reading the journal from its start.


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

    def restore(self, cursor: Mapping[str, Any], state: CurriculumState | None, *, same_rewards: bool = True) -> None:
        self.task.restore(cursor)
        if state:
            self._flying, self._next = dict(state.flying), state.next_draw
        if state and same_rewards:
            self._beliefs, self._level, self._scale = dict(state.ratings), state.level, state.scale

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
        means = [candidate.mean for candidate in candidates if math.isfinite(candidate.mean)]
        chosen = self._beliefs.get(key, NEW)
        return PromptChoice(
            pool=chosen.pool,
            looked=dict(Counter(candidate.pool for candidate in candidates)),
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
