"""A PNG of one curve, without a plotting library: pages that show model cards do not all show SVG."""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from headrace.views.report.svg import extent, labels, ticks

WIDTH, HEIGHT = 960, 360
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 18, 34
SCALE = 2
"""Pixels of a dot of a glyph."""
PAPER, INK, GRID, LINE, DOT = (255, 255, 255), (90, 100, 115), (226, 230, 236), (37, 99, 201), (224, 115, 15)
_FONT = {
    "0": ("111", "101", "101", "101", "111"), "1": ("010", "110", "010", "010", "111"), "2": ("111", "001", "111", "100", "111"),
    "3": ("111", "001", "111", "001", "111"), "4": ("101", "101", "111", "001", "001"), "5": ("111", "100", "111", "001", "111"),
    "6": ("111", "100", "111", "101", "111"), "7": ("111", "001", "001", "010", "010"), "8": ("111", "101", "111", "101", "111"),
    "9": ("111", "101", "111", "001", "111"), ".": ("0", "0", "0", "0", "1"), "-": ("000", "000", "111", "000", "000"),
    ",": ("00", "00", "00", "01", "10"), "e": ("000", "111", "111", "100", "111"),
}  # fmt: skip
"""The digits, each a bitmap five rows high."""

Point = tuple[float, float]


def curve_picture(line: Sequence[Point], dots: Sequence[Point] = ()) -> bytes:
    """Returns a PNG of a line and of dots above it, with numbers at the axes. Points that are not finite are left out."""
    points = [one for one in (*line, *dots) if math.isfinite(one[1])]
    xs = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    xs = xs if xs[0] < xs[1] else (xs[0] - 0.5, xs[0] + 0.5)
    ys = extent(y for _, y in points)
    canvas = np.full((HEIGHT, WIDTH, 3), PAPER, np.uint8)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - ys[0]) / (ys[1] - ys[0]) * (HEIGHT - TOP - BOTTOM),
        )

    rows, columns = ticks(*ys), ticks(*xs, 8, whole=True)
    for value, text in zip(rows, labels(rows), strict=True):
        row = round(place(xs[0], value)[1])
        canvas[row, LEFT : WIDTH - RIGHT] = GRID
        _write(canvas, text, right=LEFT - 10, top=row - 5)
    for value, text in zip(columns, labels(columns), strict=True):
        _write(canvas, text, right=round(place(value, ys[0])[0]) + _width(text) // 2, top=HEIGHT - BOTTOM + 12)
    finite = [place(x, y) for x, y in line if math.isfinite(y)]
    for a, b in itertools.pairwise(finite):
        _segment(canvas, a, b)
    for x, y in (place(x, y) for x, y in (*dots, *(line if len(finite) == 1 else ())) if math.isfinite(y)):
        _disc(canvas, x, y, radius=6, colour=DOT)
    return _png(canvas)


def _segment(canvas: np.ndarray, a: tuple[float, float], b: tuple[float, float]) -> None:
    count = max(2, math.ceil(math.dist(a, b)) * 2)
    for share in np.linspace(0.0, 1.0, count):
        _disc(canvas, a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]), radius=1.4, colour=LINE)


def _disc(canvas: np.ndarray, x: float, y: float, *, radius: float, colour: tuple[int, int, int]) -> None:
    top, left = max(0, math.floor(y - radius)), max(0, math.floor(x - radius))
    patch = canvas[top : math.ceil(y + radius) + 1, left : math.ceil(x + radius) + 1]
    rows, columns = np.ogrid[: patch.shape[0], : patch.shape[1]]
    patch[(rows + top - y) ** 2 + (columns + left - x) ** 2 <= radius**2] = colour


def _width(text: str) -> int:
    return sum(SCALE * (len(_FONT[one][0]) + 1) for one in text if one in _FONT)


def _write(canvas: np.ndarray, text: str, *, right: int, top: int) -> None:
    """Writes digits that end at the column `right`."""
    left = max(0, right - _width(text))
    for one in text:
        if one not in _FONT:
            continue
        bits = np.array([[bit == "1" for bit in row] for row in _FONT[one]]).repeat(SCALE, 0).repeat(SCALE, 1)
        patch = canvas[max(0, top) : max(0, top) + bits.shape[0], left : left + bits.shape[1]]
        patch[bits[: patch.shape[0], : patch.shape[1]]] = INK
        left += bits.shape[1] + SCALE


def _png(canvas: np.ndarray) -> bytes:
    """The canvas [rows, columns, 3] as a PNG with 8 bits a channel (RFC 2083)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = canvas.shape
    rows = b"".join(b"\0" + row.tobytes() for row in canvas)
    head = struct.pack(">II", width, height) + bytes((8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
