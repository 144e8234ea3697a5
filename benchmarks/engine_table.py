"""The tables that engine.py prints: loads with ratios, and one table per contender."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from engine_process import Measured

OURS, CEILING = "headrace", "ceiling"
NONE = "–"


def tables(measured: list[Measured], loads: Mapping[str, str]) -> list[str]:
    """Returns Markdown. `loads`: the description of each load by its name, in order."""
    return [*_summary(measured, loads), "", *_contenders(measured, loads), "", *_memory(measured)]


def _summary(measured: list[Measured], loads: Mapping[str, str]) -> list[str]:
    lines = [
        "| load | headrace, tokens/s | of the ceiling | best vLLM | headrace / vLLM | `generate` | continuous batching | ceiling |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load, about in loads.items():
        rates = _rates(measured, load)
        best = best_vllm(rates)
        cells = [
            f"{load}: {about}",
            _spread(rates.get(OURS)),
            _share(rates, OURS),
            f"{_spread(rates[best])}, {best.removeprefix('vllm-')}" if best else NONE,
            _ratio(rates, best),
            _spread(rates.get("hf-generate")),
            _spread(rates.get("hf-batching")),
            _spread(rates.get(CEILING)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _contenders(measured: list[Measured], loads: Iterable[str]) -> list[str]:
    lines = [
        "| load | contender | tokens/s: median (min-max) | of the ceiling | peak memory, GiB | mean log-prob | others' share of the cores | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load in loads:
        rates = _rates(measured, load)
        for name in rates:
            rows = [row for row in measured if (row.load, row.contender) == (load, name)]
            logprobs = [row.logprob for row in rows if row.logprob is not None]
            cells = [
                load,
                name,
                _spread(rates[name]),
                _share(rates, name) if name != CEILING else NONE,
                f"{max(row.peak_rss_gib for row in rows):.1f}",
                f"{statistics.fmean(logprobs):.2f}" if logprobs else NONE,
                f"{max(row.others for row in rows):.0%}",
                ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in rows[-1].notes.items()),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _memory(measured: list[Measured]) -> list[str]:
    """Returns a sentence on the cost of the KV budget."""
    bound, free = (_rates(measured, load).get(OURS) for load in ("memory", "unbounded"))
    if not bound or not free:
        return []
    ratios = [bound[number] / free[number] for number in bound.keys() & free.keys()]
    return [
        f"KV budget: {_numbers(ratios, 2)} of the throughput that the same requests have with as many running and KV for all."
    ]


def _rates(measured: list[Measured], load: str) -> dict[str, dict[int, float]]:
    """Contender -> round -> tokens per second."""
    rates: dict[str, dict[int, float]] = {}
    for row in sorted((row for row in measured if row.load == load), key=lambda row: row.contender != OURS):
        rates.setdefault(row.contender, {})[row.round] = row.rate
    return rates


def best_vllm(rates: Mapping[str, Mapping[int, float]]) -> str:
    """Returns the vLLM contender with the highest median; empty if there is none."""
    names = [name for name in rates if name.startswith("vllm")]
    return max(names, key=lambda name: statistics.median(rates[name].values()), default="")


def _ratio(rates: Mapping[str, Mapping[int, float]], best: str) -> str:
    """Returns the median of the ratios of each round, since a disturbance of minutes affects both contenders."""
    common = rates[best].keys() & rates[OURS].keys() if best and OURS in rates else set()
    return _numbers([rates[OURS][number] / rates[best][number] for number in common], 2) if common else NONE


def _share(rates: Mapping[str, Mapping[int, float]], name: str) -> str:
    if name not in rates or CEILING not in rates:
        return NONE
    ceiling = statistics.median(rates[CEILING].values())
    return f"{statistics.median(rates[name].values()) / ceiling:.0%}"


def _spread(rates: Mapping[int, float] | None) -> str:
    return _numbers(list(rates.values()), 1) if rates else NONE


def _numbers(values: list[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else middle
