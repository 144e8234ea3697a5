"""Histograms that compare the groups that were drawn with those that were trained: by length, and by mean reward."""

from __future__ import annotations

import math
from collections import Counter

from headrace.facts.group_numbers import Histogram, Sieve, discarded
from headrace.facts.run_state import RunState
from headrace.facts.texts import number, percent, plural
from headrace.views.report.svg import Chart, figure

SLOTS = 40
"""Slots of a histogram at most."""
COLOURS = ("c1", "c6", "c5")
"""Blue is drawn and dark grey is trained, as in the curves."""


def lengths(state: RunState) -> str:
    top = max([*state.lengths.drawn.counts, *state.lengths.trained.counts, 1])
    width = max(1, math.ceil((top + 1) / SLOTS))
    note = " ".join(part for part in ("Share of completions.", _unfinished(state)) if part)
    return _histograms(
        "Completion lengths, drawn against trained", state.lengths, low=0.0, width=width, unit="tokens", note=note
    )


def solve_rates(state: RunState) -> str:
    values = [*state.solve_rates.drawn.counts, *state.solve_rates.trained.counts]
    if not values:
        return ""
    low, high = min(values), max(values)
    width = (high - low) / (SLOTS // 2) or 1.0
    note = "Share of groups. Groups whose rollouts are all right or all wrong have no gradient and are never trained."
    return _histograms(
        "Solve rates of prompts, drawn against trained",
        state.solve_rates,
        low=low,
        width=width,
        unit="mean reward",
        note=note,
    )


def _unfinished(state: RunState) -> str:
    count = sum(fate.unfinished for fate in discarded(state.fates))
    return f"{plural(count, 'group')} cancelled before completion: missing here." if count else ""


def _histograms(title: str, sieve: Sieve, *, low: float, width: float, unit: str, note: str) -> str:
    """Draws three bars per slot. A difference between the second and the third is a bias of the run."""
    named = (("drawn", sieve.drawn), ("could be trained", sieve.trainable), ("trained", sieve.trained))
    shares = [_shares(one, low, width) for _, one in named]
    if not any(shares):
        return ""
    last = max(slot for one in shares for slot in one)
    highest = max(share for one in shares for share in one.values())
    ends = (low, low + (last + 1) * width)
    chart = Chart(ends, (0.0, min(1.0, highest * 1.08)), percent=True, x_label=unit, whole=width == int(width))
    for index, one in enumerate(shares):
        for slot, share in one.items():
            left = low + (slot + 0.08 + 0.28 * index) * width
            chart.box(left, left + 0.28 * width, 0, share, COLOURS[index])
    for slot in range(last + 1):
        left = low + slot * width
        lines = [f"{name} {percent(one.get(slot, 0.0))}" for (name, _), one in zip(named, shares, strict=True)]
        chart.hover(left, left + width, "\n".join([f"{number(left)} to {number(left + width)} {unit}", *lines]))
    legend = [(colour, _legend(*one)) for colour, one in zip(COLOURS, named, strict=True)]
    return figure(title, chart.html(title), legend, note)


def _shares(one: Histogram, low: float, width: float) -> dict[int, float]:
    counts: Counter[int] = Counter()
    for value, count in one.counts.items():
        counts[int((value - low) / width)] += count
    return {slot: count / one.count for slot, count in sorted(counts.items())}


def _legend(name: str, one: Histogram) -> str:
    return f"{name}: {one.count:,}, mean {number(one.mean)}" if one.mean is not None else f"{name}: none"
