"""Sampler against trainer by lag, over many steps: token-weighted means of `reports.LagStats`."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.observe.records import StepRow
from headrace.reports import LagStats


def over_steps(rows: Iterable[StepRow]) -> list[LagStats]:
    """Returns the statistics of each lag that had tokens, `swapped` last.

    The token-weighted mean is exact for shares and ratios. Quantiles and the effective sample size are means of the steps' own values,
    and `max` is the largest.
    """
    by_name: dict[str, list[LagStats]] = {}
    for row in rows:
        for one in row.report.lags:
            by_name.setdefault(one.name, []).append(one)
    return [_joined(name, by_name[name]) for name in sorted(by_name)]


def _joined(name: str, steps: list[LagStats]) -> LagStats:
    tokens = sum(one.tokens for one in steps)

    def mean(field: str) -> float:
        return sum(getattr(one, field) * one.tokens for one in steps) / tokens

    return LagStats(
        name=name,
        tokens=tokens,
        ratio=mean("ratio"),
        kl=mean("kl"),
        ess=mean("ess"),
        chi2=mean("chi2"),
        clipped=mean("clipped"),
        masked={key: _weighted(steps, "masked", key, tokens) for key in _keys(steps, "masked")},
        gaps={
            key: max(one.gaps.get(key, 0.0) for one in steps) if key == "max" else _weighted(steps, "gaps", key, tokens)
            for key in _keys(steps, "gaps")
        },
    )


def _keys(steps: list[LagStats], field: str) -> list[str]:
    return list(dict.fromkeys(key for one in steps for key in getattr(one, field)))


def _weighted(steps: list[LagStats], field: str, key: str, tokens: int) -> float:
    return sum(getattr(one, field).get(key, 0.0) * one.tokens for one in steps) / tokens
