"""The troubles of a run in words and numbers that every view shows: shares, failures by kind, held-out prompts that failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace.facts.facts import Evaluated, FirstFailure
from headrace.facts.numbers.shares import Tally
from headrace.facts.numbers.state import RunState
from headrace.facts.texts import counted, percent, plural


class Failing(NamedTuple):
    """One way in which rollouts fail."""

    kind: str
    """The class of the exception such as `KeyError`, or the reason if nothing was raised."""
    rollouts: int
    """Rollouts that failed in this way, held-out ones included."""
    first: FirstFailure | None
    """None in runs that did not record it."""


def failings(state: RunState) -> list[Failing]:
    """Returns the ways in which rollouts failed, the commonest first."""
    counts = state.shares.total.kinds.copy()
    for one in state.evals:
        counts.update(one.kinds or one.failures)
    return [Failing(kind, count, state.failures.get(kind)) for kind, count in counts.most_common() if count > 0]


def shares(tally: Tally) -> list[str]:
    """Returns those of `cut off 92 %`, `no contrast 86 %`, `dropped 2 %` and `failed 48 % (KeyError 31)` that are not zero."""
    parts = (
        ("cut off", tally.truncated_share),
        ("no contrast", tally.no_contrast_share),
        ("dropped", tally.dropped_share),
        ("failed", tally.failed_share),
    )
    found = [f"{name} {percent(share)}" for name, share in parts if share]
    if tally.failed:
        found[-1] += f" ({counted(+tally.kinds)})"
    return found


def measured_on(one: Evaluated) -> str:
    """Returns the prompts behind a held-out reward: `8 prompts`, `4 of 8 prompts, 4 failed: KeyError`."""
    kinds = one.kinds or one.failures
    if one.failed_prompts:
        return f"{one.prompts} of {plural(one.asked, 'prompt')}, {one.failed_prompts} failed: {', '.join(kinds)}"
    failed = f", {plural(sum(kinds.values()), 'rollout')} failed: {', '.join(kinds)}" if kinds else ""
    return f"{plural(one.prompts, 'prompt')}{failed}"


def judged(answer: str, extracted: Mapping[str, str]) -> str:
    """Returns `extracted 12, right answer 14`, or the parts of it that are known."""
    seen = [repr(text) if text else "nothing" for text in extracted.values()]
    names = list(extracted) if len(extracted) > 1 else [""] * len(seen)
    parts = [f"extracted {text}{f' for {name}' if name else ''}" for name, text in zip(names, seen, strict=True)]
    return ", ".join([*parts, *([f"right answer {answer}"] if answer else [])])
