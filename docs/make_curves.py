"""Draws the curve of one run or of several as an SVG with text, for pages: `python docs/make_curves.py RUN [RUN ...] --to FILE.svg`.

The line is the mean reward of the rollouts drawn for each step, smoothed over three steps; dots are held-out rewards with their standard error.
Everything is read from the run's own metrics. Colours are dark enough for white and light enough for black.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from headrace.facts.facts import Evaluated
from headrace.facts.records import StepRow, read_metrics
from headrace.views.report.svg import extent, labels, ticks

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 58
COLOURS = ("#2c7fb8", "#d95f0e", "#31a354", "#8856a7")
SMOOTHED = 3

Point = tuple[float, float]


def picture(runs: Sequence[tuple[str, list[Point], list[tuple[float, float, float]]]]) -> str:
    """Draws runs: name, points of the line, and (step, held-out reward, standard error) of the dots."""
    xs = extent([x for _, line, dots in runs for x, *_ in (*line, *dots)], zero=True, pad=0.02)
    tops = [y + e for _, _, dots in runs for _, y, e in dots] + [y - e for _, _, dots in runs for _, y, e in dots]
    ys = extent([*(y for _, line, _ in runs for _, y in line), *tops])

    def place(x: float, y: float) -> Point:
        across, up = (x - xs[0]) / (xs[1] - xs[0]), (y - ys[0]) / (ys[1] - ys[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    rows, columns = ticks(*ys), ticks(*xs, 8, whole=True)
    parts = []
    for value, text in zip(rows, labels(rows), strict=True):
        at = place(xs[0], value)[1]
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#888" stroke-opacity=".3"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in zip(columns, labels(columns), strict=True):
        parts.append(
            f'<text x="{place(value, ys[0])[0]:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{text}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    held_out = "; dots: held out" if any(dots for *_, dots in runs) else ""
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - BOTTOM + 34}" text-anchor="middle">optimizer step (lines: reward as drawn{held_out})</text>'
    )
    for number, (name, line, dots) in enumerate(runs):
        parts += _drawn(COLOURS[number % len(COLOURS)], [place(*one) for one in line])
        for x, y, error in dots:
            (at, low), (_, high), (_, centre) = place(x, y - error), place(x, y + error), place(x, y)
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f'<path d="M{at:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{at:.1f}" cy="{centre:.1f}" r="4" fill="{colour}"/>')
        left = LEFT + number * (WIDTH - LEFT - RIGHT) / len(runs)
        parts.append(
            f'<rect x="{left:.0f}" y="{HEIGHT - 15}" width="14" height="4" fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{left + 20:.0f}" y="{HEIGHT - 9}">{escape(name)}</text>')
    style = "text{font:12px system-ui,sans-serif;fill:#777}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{style}</style>'
    return head + "\n".join(parts) + "</svg>\n"


def _drawn(colour: str, points: Sequence[Point]) -> Iterator[str]:
    if points:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'


def smooth(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(values))]


def curve(run: Path) -> tuple[list[Point], list[tuple[float, float, float]]]:
    """The line and the dots of a run's directory."""
    facts = read_metrics(run)
    rows = [one for one in facts if isinstance(one, StepRow) and math.isfinite(one.reward_drawn)]
    line = list(
        zip([float(one.report.version) for one in rows], smooth([one.reward_drawn for one in rows]), strict=True)
    )
    return line, [(one.step, one.reward_mean, one.reward_sem) for one in facts if isinstance(one, Evaluated)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--names", nargs="*", default=(), help="instead of the directories' names")
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    names = arguments.names or [run.name for run in arguments.runs]
    shown = []
    for name, run in zip(names, arguments.runs, strict=True):
        line, dots = curve(run)
        shown.append((name, line, dots))
    arguments.to.write_text(picture(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
