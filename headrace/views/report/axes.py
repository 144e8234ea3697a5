"""The ticks of an axis and their labels: round numbers, integers for counts, and no two labels alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

ROUND = (1, 2, 2.5, 5, 10)
CLOCK = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
"""Seconds between the ticks of a clock. The page's script uses the same."""
MOST_DECIMALS = 6
"""Decimals of a label at most; smaller steps are written with an exponent."""


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Returns about `count` round values inside [low, high]. `whole`: integers only, for counts."""
    raw = (high - low) / max(1, count)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    if whole:
        raw = max(1.0, raw)
    power = 10.0 ** math.floor(math.log10(raw) + 1e-9)
    wide_enough = (power * m for m in ROUND if power * m >= raw * 0.999)
    return _multiples(low, high, next(step for step in wide_enough if not whole or step == int(step)))


def clock_ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Returns seconds inside [low, high], at round minutes and hours."""
    return _multiples(low, high, next((step for step in CLOCK if (high - low) / step <= count), 7 * CLOCK[-1]))


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]


def labels(values: Sequence[float], *, percent: bool = False) -> list[str]:
    """Formats the values with the fewest digits that show each exactly, so that no two are alike."""
    shown = [100 * value for value in values] if percent else list(values)
    step = min((b - a for a, b in itertools.pairwise(shown)), default=abs(shown[0]) if shown else 0.0) or 1.0
    forms = [f",.{digits}f" for digits in range(MOST_DECIMALS + 1)] + [f".{digits}e" for digits in range(17)]
    exact = (
        texts
        for texts in ([format(value, form) for value in shown] for form in forms)
        if all(abs(float(text.replace(",", "")) - one) <= 1e-3 * step for text, one in zip(texts, shown, strict=True))
    )
    found = next(exact, [repr(value) for value in shown])
    texts = [text if one else "0" if "e" in text else text.lstrip("-") for text, one in zip(found, shown, strict=True)]
    return [f"{text} %" for text in texts] if percent else texts


def extent(
    values: Iterable[float],
    *,
    zero: bool = False,
    within: tuple[float, float] = (-math.inf, math.inf),
    pad: float = 0.06,
) -> tuple[float, float]:
    """Returns the range of an axis for the finite values, never empty. `within`: the possible values, beyond which the range does not
    extend."""
    finite = [value for value in values if math.isfinite(value)]
    if zero:
        finite.append(0.0)
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if low == high:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    else:
        room = pad * (high - low)
        low, high = (low if zero and low == 0 else low - room), high + room
    low, high = max(low, within[0]), min(high, within[1])
    return (low, high) if low < high else (low - 0.5, low + 0.5)
