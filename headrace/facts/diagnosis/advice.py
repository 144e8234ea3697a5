"""Advice for a run that trains on few of its rollouts: a condition on its numbers, and a sentence with the remedy.

Each rule looks at the last groups. To add one, write a function of the state and name it in `RULES`; it returns None if its condition
does not hold. The rules are in the order in which to follow them: completions that are cut off have no contrast either, so cutting off
comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.facts.numbers import measures
from headrace.facts.numbers.state import RunState
from headrace.facts.texts import counted, number, percent

OFTEN = 0.5
"""Share of completions that are cut off, or of groups without contrast, from which advice is given."""
DISCARDED = 0.25
"""The same for groups that are dropped for another reason."""
FAILING = 0.05
"""The same for rollouts that fail."""
STRANGERS = 512
"""Draws of a curriculum from which to give advice about prompts that do not come back."""
LEAST = 32
"""Fewest rollouts from which to give advice; an eighth as many groups."""


class Advice(NamedTuple):
    name: str
    """A key of `RULES`."""
    sentence: str


def advices(state: RunState) -> list[Advice]:
    """Returns the advice that applies now, in the order in which to follow it."""
    recent = state.shares.recent
    if not state.started or recent.rollouts < LEAST or recent.groups < LEAST // 8:
        return []
    return [Advice(name, sentence + _waiting(state)) for name, rule in RULES.items() if (sentence := rule(state))]


def _failed(state: RunState) -> str | None:
    failing = state.shares.failing
    share = failing.failed_share
    if share is None or share <= FAILING:
        return None
    said = f"{percent(share)} of the last {failing.rollouts} rollouts failed ({counted(+failing.kinds)}) and are not trained"
    return (
        f"{said}: correct the reward, or the rows that it cannot read"
        if failing.faults
        else f"{said}: look at the logs"
    )


def _cut_off(state: RunState) -> str | None:
    recent = state.shares.recent
    share = recent.truncated_share
    assert state.started is not None
    if share is None or share < OFTEN:
        return None
    limit = f"at {state.started.max_tokens} tokens" if state.started.max_tokens else "at their limit"
    barren = recent.no_contrast_share or 0.0
    then = f", and {percent(barren)} of groups have no contrast" if barren >= OFTEN else ""
    return f"{percent(share)} of completions are cut off {limit}{then}: raise rollout.max_tokens"


def _no_contrast(state: RunState) -> str | None:
    recent = state.shares.recent
    share = recent.no_contrast_share
    if share is None or share < OFTEN or (recent.truncated_share or 0.0) >= OFTEN:
        return None
    mean = state.fates.of("no_contrast").rewards.mean
    known = f" (their mean is {number(mean)})" if mean is not None else ""
    return (
        f"{percent(share)} of groups have no contrast, their rewards are all equal{known}: choose easier or harder prompts, "
        "give partial rewards, or raise rollout.group_size"
    )


def _never_again(state: RunState) -> str | None:
    chosen = state.choices
    if chosen.draws < STRANGERS or chosen.drawn["new"] < 0.95 * chosen.draws:
        return None
    return (
        f"{chosen.drawn['new']:,} of {chosen.draws:,} draws were of prompts that had not been drawn before, of which a curriculum knows "
        'nothing: set curriculum.kind = "uniform", or train on fewer prompts for more epochs'
    )


def _discarded(state: RunState) -> str | None:
    share = state.shares.recent.dropped_share
    if share is None or share < DISCARDED:
        return None
    reasons = {reason: count for reason, count in state.accounting.dropped.items() if reason != "no_contrast"}
    remedy = (
        'raise staleness.max_lag, or use staleness.overdue = "wait"'
        if {"overdue", "interrupted"} & reasons.keys()
        else "the reasons are in the report"
    )
    return f"{percent(share)} of groups are dropped ({counted(reasons)}): {remedy}"


def _waiting(state: RunState) -> str:
    idle = measures.recent_trainer_idle(state)
    return f" (the trainer waits {percent(idle)} of its time)" if idle is not None and idle >= OFTEN else ""


Rule = Callable[[RunState], str | None]
RULES: dict[str, Rule] = {
    "failed": _failed,
    "cut off": _cut_off,
    "no contrast": _no_contrast,
    "dropped": _discarded,
    "curriculum": _never_again,
}
