"""The elements of all charts: scales and ticks, marks as SVG, and tables that also fit on a phone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape

# --- The ticks of an axis and their labels
# Round numbers, integers for counts, and no two labels alike.


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
        if all(abs(float(text.replace(",", "")) - tick) <= 1e-3 * step for text, tick in zip(texts, shown, strict=True))
    )
    found = next(exact, [repr(value) for value in shown])
    texts = [
        text if tick else "0" if "e" in text else text.lstrip("-") for text, tick in zip(found, shown, strict=True)
    ]
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


# --- A small chart
# Axes, lines, bands, bars, dots. Colours come from the page's style sheet, which has a light and a dark theme.
#
# Only the drawing is SVG, stretched to the available width. Text is HTML beside and above it, positioned in per cent, so that it keeps
# its size on a phone.


WIDTH, HEIGHT = 1000, 200
"""Size of the coordinate system; the page decides how large it is shown."""
APART = 14.0
"""Least distance of two words in per cent of the width; closer ones would overlap."""
NARROW = 30
"""Digits that fit beside each other beneath a chart on a phone of 360 pixels."""

Point = tuple[float, float]


class Chart:
    """Collects SVG. Takes data coordinates and returns markup; non-finite points are left out."""

    def __init__(
        self,
        xs: tuple[float, float],
        ys: tuple[float, float],
        *,
        percent: bool = False,
        x_label: str = "optimizer step",
        whole: bool = True,
    ) -> None:
        """`percent`: values of y are shares. `whole`: values of x are counts."""
        self._x0, self._x1 = xs if xs[0] < xs[1] else (xs[0] - 0.5, xs[0] + 0.5)
        self._y0, self._y1 = ys
        self._percent, self._x_label, self._whole = percent, x_label, whole
        self._parts: list[str] = []
        self._words: list[tuple[float, str]] = []

    def x(self, value: float) -> float:
        return (value - self._x0) / (self._x1 - self._x0) * WIDTH

    def y(self, value: float) -> float:
        inside = min(max(value, self._y0), self._y1)
        return HEIGHT - (inside - self._y0) / (self._y1 - self._y0) * HEIGHT

    def line(self, points: Sequence[Point], name: str) -> Chart:
        """Draws a path in the colour of the class `name`, with a gap where a value is not finite."""
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
        """Draws dots, with error bars if given. A dot is a stroke without length: unlike a circle it stays round when the drawing is
        stretched."""
        for (x, y), error in zip(points, errors or [math.nan] * len(points), strict=True):
            if not math.isfinite(y):
                continue
            at = f"M{self.x(x):.1f} "
            if math.isfinite(error):
                whisker = f"{at}{self.y(y - error):.1f}V{self.y(y + error):.1f}"
                self._parts.append(f'<path class="whisker {name}" d="{whisker}"/>')
            self._parts.append(f'<path class="dot {name}" d="{at}{self.y(y):.1f}h0"/>')
        return self

    def box(self, x0: float, x1: float, y0: float, y1: float, name: str) -> Chart:
        left, right, top, bottom = self.x(x0), self.x(x1), self.y(y1), self.y(y0)
        if bottom - top > 0.05:
            self._parts.append(
                f'<rect class="box {name}" x="{left:.2f}" y="{top:.2f}" width="{max(0.5, right - left):.2f}"'
                f' height="{bottom - top:.2f}"/>'
            )
        return self

    def cell(self, xs: tuple[float, float], ys: tuple[float, float], name: str, strength: float) -> Chart:
        """Draws a box of a heat map. `strength`: 0 to 1."""
        left, right, top, bottom = self.x(xs[0]), self.x(xs[1]), self.y(ys[1]), self.y(ys[0])
        self._parts.append(
            f'<rect class="box {name}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" fill-opacity="{strength:.2f}"/>'
        )
        return self

    def rule(self, y: float) -> Chart:
        """Draws a dashed horizontal line."""
        at = self.y(y)
        self._parts.append(f'<path class="rule" d="M0 {at:.1f}H{WIDTH}"/>')
        return self

    def mark(self, x: float, text: str) -> Chart:
        """Draws a dashed vertical line, with a word if there is room."""
        self._parts.append(f'<path class="rule" d="M{self.x(x):.1f} 0V{HEIGHT}"/>')
        at = _share(self.x(x), WIDTH)
        if all(abs(at - other) >= APART for other, _ in self._words):
            self._words.append((at, text))
        return self

    def hover(self, x0: float, x1: float, tip: str) -> Chart:
        """Adds an invisible column that shows `tip` (lines separated by newlines)."""
        left, right = self.x(x0), self.x(x1)
        self._parts.append(
            f'<rect class="hover" x="{left:.2f}" y="0" width="{max(1.0, right - left):.2f}" height="{HEIGHT}"'
            f' data-tip="{escape(tip)}"/>'
        )
        return self

    def html(self, title: str) -> str:
        """Returns the drawing with the text around it."""
        ys, xs = ticks(self._y0, self._y1), ticks(self._x0, self._x1, 7, whole=self._whole)
        left, below = labels(ys, percent=self._percent), labels(xs)
        grid = "".join(f'<path class="grid" d="M0 {self.y(y):.1f}H{WIDTH}"/>' for y in ys)
        words = "".join(
            f'<span class="word{" before" if at > 100 - APART else ""}" style="left:{at:.2f}%">{escape(text)}</span>'
            for at, text in self._words
        )
        return (
            f'<div class="chart" role="img" aria-label="{escape(title)}" style="{_room(left, below)}">'
            f'<div class="ys">{"".join(_at("top", self.y(y), HEIGHT, text) for y, text in zip(ys, left, strict=True))}</div>'
            f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{grid}{"".join(self._parts)}'
            f'<path class="axis" d="M0 {HEIGHT}H{WIDTH}"/></svg>{words}</div>'
            f'<div class="xs">{"".join(self._below(xs, below))}</div><div class="unit">{escape(self._x_label)}</div></div>'
        )

    def _below(self, values: Sequence[float], texts: Sequence[str]) -> list[str]:
        """Places the labels of the x axis. If a phone has no room for all, it leaves out every second one and keeps the rounder half."""
        step = values[1] - values[0] if len(values) > 1 else 1.0
        many = len(texts) * (max(map(len, texts), default=0) + 2) > NARROW
        return [
            _at("left", self.x(value), WIDTH, text, "more" if many and round(value / step) % 2 else "")
            for value, text in zip(values, texts, strict=True)
        ]


def _share(at: float, whole: float) -> float:
    return 100 * at / whole


def _at(side: str, at: float, whole: float, text: str, name: str = "") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<span{kind} style="{side}:{_share(at, whole):.2f}%">{text}</span>'


def _room(left: Sequence[str], below: Sequence[str]) -> str:
    """Returns the margins in digit widths: as wide as the longest label on the left, half a label after the last tick on the right."""
    longest = max((len(text) + text.count("%") for text in left), default=1)
    return f"--left:{longest + 1}ch;--right:{max(map(len, below), default=1) / 2:g}ch"


def figure(title: str, drawing: str, legend: Sequence[tuple[str, str]] = (), note: str = "", wide: bool = False) -> str:
    """Returns a chart with its title, a legend of (class, name), and a note beneath."""
    keys = "".join(f'<span class="key"><i class="{name}"></i>{escape(text)}</span>' for name, text in legend)
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="{"wide" if wide else ""}"><figcaption><b>{escape(title)}</b><span class="keys">{keys}</span>'
        f"</figcaption>{drawing}{below}</figure>"
    )


# --- Tables that also fit on a phone.


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """Returns a table. Cells are HTML; columns whose heading starts with # are numbers.

    A phone shows each row as a block: texts on separate lines, then the numbers with the names of their columns.
    """
    classes = ["num" if title.startswith("#") else "" for title in head]
    names = [escape(title.lstrip("#")) for title in head]
    top = "".join(f'<th class="{kind}">{column}</th>' for column, kind in zip(names, classes, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-head="{column}">{cell}</td>'
            for cell, kind, column in zip(row, classes, names, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
