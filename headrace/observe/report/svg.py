"""A small chart: axes, lines, bands, bars, dots. Colours come from the page's style sheet, so both themes share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from headrace.observe.text import tick

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 30

Point = tuple[float, float]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values inside [low, high]."""
    raw = (high - low) / max(1, count)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def extent(values: Iterable[float], *, zero: bool = False, pad: float = 0.06) -> tuple[float, float]:
    """The range to draw finite values in, never empty."""
    finite = [value for value in values if math.isfinite(value)]
    if zero:
        finite.append(0.0)
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if low == high:
        return (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    room = pad * (high - low)
    return (low if zero and low == 0 else low - room), high + room


class Chart:
    """Collects SVG. Data coordinates in, markup out; non-finite points are left out."""

    def __init__(
        self,
        xs: tuple[float, float],
        ys: tuple[float, float],
        *,
        width: int = 560,
        height: int = 210,
        y_text: Callable[[float], str] = tick,
        x_label: str = "optimizer step",
    ) -> None:
        self.width, self.height = width, height
        self._x0, self._x1 = xs if xs[0] < xs[1] else (xs[0] - 0.5, xs[0] + 0.5)
        self._y0, self._y1 = ys
        self._parts: list[str] = []
        self._axes(y_text, x_label)

    def x(self, value: float) -> float:
        return LEFT + (value - self._x0) / (self._x1 - self._x0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        inside = min(max(value, self._y0), self._y1)
        return self.height - BOTTOM - (inside - self._y0) / (self._y1 - self._y0) * (self.height - TOP - BOTTOM)

    def _axes(self, y_text: Callable[[float], str], x_label: str) -> None:
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        for value in ticks(self._y0, self._y1):
            y = self.y(value)
            self._parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self._parts.append(
                f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{y_text(value)}</text>'
            )
        for value in ticks(self._x0, self._x1, 7):
            self._parts.append(
                f'<text class="tick" x="{self.x(value):.1f}" y="{bottom + 15}" text-anchor="middle">{tick(value)}</text>'
            )
        self._parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        self._parts.append(f'<text class="label" x="{right}" y="{self.height - 3}" text-anchor="end">{x_label}</text>')

    def line(self, points: Sequence[Point], name: str) -> Chart:
        """A path in the colour of the class `name`; a gap where a value is not finite."""
        path, pen = [], "M"
        for x, y in points:
            if math.isfinite(y):
                path.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
                pen = "L"
            else:
                pen = "M"
        if sum(math.isfinite(y) for _, y in points) == 1:
            return self.dots(points, name)
        self._parts.append(f'<path class="line {name}" d="{"".join(path)}"/>')
        return self

    def band(self, lower: Sequence[Point], upper: Sequence[Point], name: str) -> Chart:
        pairs = [(a, b) for a, b in zip(lower, upper, strict=True) if math.isfinite(a[1]) and math.isfinite(b[1])]
        outline = [a for a, _ in pairs] + [b for _, b in reversed(pairs)]
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in outline)
        self._parts.append(f'<polygon class="band {name}" points="{path}"/>')
        return self

    def dots(self, points: Sequence[Point], name: str, errors: Sequence[float] = ()) -> Chart:
        for (x, y), error in zip(points, errors or [math.nan] * len(points), strict=True):
            if not math.isfinite(y):
                continue
            if math.isfinite(error):
                self._parts.append(
                    f'<line class="whisker {name}" x1="{self.x(x):.1f}" x2="{self.x(x):.1f}"'
                    f' y1="{self.y(y - error):.1f}" y2="{self.y(y + error):.1f}"/>'
                )
            self._parts.append(f'<circle class="dot {name}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.5"/>')
        return self

    def box(self, x0: float, x1: float, y0: float, y1: float, name: str) -> Chart:
        left, right, top, bottom = self.x(x0), self.x(x1), self.y(y1), self.y(y0)
        if bottom - top > 0.05:
            self._parts.append(
                f'<rect class="box {name}" x="{left:.2f}" y="{top:.2f}" width="{max(0.5, right - left):.2f}"'
                f' height="{bottom - top:.2f}"/>'
            )
        return self

    def rule(self, y: float, text: str) -> Chart:
        """A dashed horizontal line with a word."""
        at = self.y(y)
        self._parts.append(f'<line class="rule" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        self._parts.append(f'<text class="label" x="{LEFT + 4}" y="{at - 4:.1f}">{escape(text)}</text>')
        return self

    def mark(self, x: float, text: str) -> Chart:
        """A dashed vertical line with a word."""
        at = self.x(x)
        self._parts.append(f'<line class="rule" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}"/>')
        self._parts.append(f'<text class="label" x="{at + 4:.1f}" y="{TOP + 9}">{escape(text)}</text>')
        return self

    def hover(self, x0: float, x1: float, tip: str) -> Chart:
        """An invisible column that shows `tip` (lines separated by newlines)."""
        left, right = self.x(x0), self.x(x1)
        self._parts.append(
            f'<rect class="hover" x="{left:.2f}" y="{TOP}" width="{max(1.0, right - left):.2f}"'
            f' height="{self.height - TOP - BOTTOM}" data-tip="{escape(tip)}"/>'
        )
        return self

    def svg(self, title: str) -> str:
        return (
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(title)}">'
            f"{''.join(self._parts)}</svg>"
        )


def figure(title: str, drawing: str, legend: Sequence[tuple[str, str]] = (), note: str = "", wide: bool = False) -> str:
    """A chart with its title, a legend of (class, name), and a note beneath."""
    keys = "".join(f'<span class="key"><i class="{name}"></i>{escape(text)}</span>' for name, text in legend)
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="{"wide" if wide else ""}"><figcaption><b>{escape(title)}</b><span class="keys">{keys}</span>'
        f"</figcaption>{drawing}{below}</figure>"
    )
