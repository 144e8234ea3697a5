"""Formats numbers for people, and draws small charts from characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
EIGHTHS = "▏▎▍▌▋▊▉█"


def number(value: float, digits: int = 3) -> str:
    """Formats a number to its significant digits: 0.412, 12.3, 4,120, 2.1e-05."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 10.0**-digits:
        return f"{value:.{max(digits - 2, 0)}e}"
    return f"{value:.{digits}g}" if abs(value) >= 1 else f"{value:.{digits}f}"


def dollars(value: float) -> str:
    """Formats dollars: `$1,240`, `$12.40`, `$0.0031`.

    >>> dollars(1240.4), dollars(12.4), dollars(0.00312), dollars(0)
    ('$1,240', '$12.40', '$0.0031', '$0')
    """
    if value >= 1000:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.1 else f"${value:.2g}"


def reward_text(value: float) -> str:
    """Formats a reward: 0.412, -3.000, 1.25e+09. A column or a line holds one, whatever the reward's scale is."""
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "not measured" if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Formats seconds: `0:07`, `12:40`, `3:05:09`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def short_time(seconds: float) -> str:
    """Formats seconds: `0.8 ms`, `1.25 s`, `3:20`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms" if seconds else "0 ms"
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def size(count: float) -> str:
    """Formats bytes: `640 bytes`, `4.31 MB`, `269 MB`, `15 GB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * unit:
            return f"{count / unit:,.0f} {name}" if count >= 1000 * unit else f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def counted(counts: Mapping[str, int]) -> str:
    """Formats counts: `no_contrast 12, reward_timeout 1`, the commonest first."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def with_error(mean: float, error: float) -> str:
    """Formats a mean: `0.412 ± 0.021`, or without the error if it is unknown."""
    if not math.isfinite(mean):
        return "not measured"
    return f"{reward_text(mean)} ± {reward_text(error)}" if math.isfinite(error) else reward_text(mean)


def shrink(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values: means of stretches of equal length. Non-finite values are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) <= width:
        return finite
    edges = [round(i * len(finite) / width) for i in range(width + 1)]
    return [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int = 40, within: tuple[float, float] | None = None) -> str:
    """Draws values as blocks. `within`: the values of the lowest and the highest block, by default the smallest and the largest value."""
    kept = shrink(values, width)
    if not kept:
        return ""
    low, high = within or (min(kept), max(kept))
    span = high - low
    if span == 0:
        return BLOCKS[3] * len(kept)
    return "".join(BLOCKS[min(7, int(8 * (value - low) / span))] for value in kept)


def bar(share: float, width: int) -> str:
    """Draws a horizontal bar, `share` of `width` long, in eighths of a character. Any share above 0 is visible."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest - 1] if rest else "")


def clip(text: str, width: int) -> str:
    """Shortens text to one line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
