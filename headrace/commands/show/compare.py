"""`headrace ls [RUNS_DIR]` and `headrace compare RUN RUN [...]`: runs in a table, each with its state, or side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.core.errors import ConfigError
from headrace.core.printing import echo, printable_json
from headrace.durable.atomic_files import replace_file
from headrace.facts.records import METRICS
from headrace.facts.texts import clip, dollars, duration, number, sparkline
from headrace.processes.health.live_status import judge, read_live
from headrace.run.run_directory import held
from headrace.views.board.followed_run import RunLine, RunList
from headrace.views.report.data import load
from headrace.views.report.side_by_side import (
    COLOURS,
    CURVES,
    ComparedRun,
    compared_numbers,
    comparison_page,
    settings_apart,
)
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, TableColumn, numbers, texts

# --- `headrace ls [RUNS_DIR]`
# The runs of a directory, each with its state, its step, its last reward and its cost.


STATE = 48
"""Characters of a state; headrace status shows all of it."""

COLUMNS = (
    TableColumn(title="run", whole=28),
    TableColumn(title="state"),
    TableColumn(title="verdict", whole=20, spare=1),
    TableColumn(title="step", number=True),
    TableColumn(title="reward", number=True),
    TableColumn(title="held out", number=True, spare=2),
    TableColumn(title="took", number=True, spare=4),
    TableColumn(title="cost", number=True, spare=3),
    TableColumn(title="changed", number=True, spare=5),
)


def list_runs(directory: Path, as_json: bool = False, console: Console | None = None) -> int:
    """Prints the runs, the newest first. Raises ConfigError if there is no such directory."""
    console = console or Console()
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; runs are kept in runs/ unless out says otherwise (headrace train makes it)"
        )
    lines = RunList(directory, held).lines()
    if as_json:
        echo(printable_json(msgspec.json.format(msgspec.json.encode(lines), indent=2).decode()))
        return 0
    if not lines:
        console.print(f"{directory} holds no run yet; headrace train CONFIG.toml starts one")
        return 0
    priced = any(line.cost is not None for line in lines)
    drawn = FittedTable([column for column in COLUMNS if priced or column.title != "cost"])
    for line in lines:
        drawn.add_row(*_cells(line, priced), style="bold" if line.living else "")
    console.print(drawn)
    return 0


def _cells(line: RunLine, priced: bool) -> tuple[str, ...]:
    return (
        line.name,
        clip(line.words, STATE),
        line.verdict or "–",
        f"{line.step:,} of {line.steps:,}" if line.steps else f"{line.step:,}",
        "–" if line.reward is None else f"{line.reward:.3f}",
        "–" if line.held_out is None else f"{line.held_out:.3f}",
        duration(line.seconds),
        *(["–" if line.cost is None else dollars(line.cost)] * priced),
        _day(line.changed),
    )


def _day(seconds: float) -> str:
    """`11-28 13:05` in this year, else `2024-11-28`."""
    then = time.localtime(seconds)
    return time.strftime("%m-%d %H:%M" if then.tm_year == time.localtime().tm_year else "%Y-%m-%d", then)


# --- `headrace compare RUN RUN [...]`
# The settings that differ, the last numbers side by side, and the curves, in the terminal or as a page.


CURVE = 60
"""Characters of a curve in the terminal."""

NARROWEST, BESIDE = 20, 14
"""Characters of a curve beside its name; with less room it goes beneath. And those of spaces and the last number beside a curve."""


def compare(runs: Sequence[Path], page: Path | None = None, console: Console | None = None) -> int:
    """Prints the comparison, or writes it to `page`. Raises ConfigError if a directory holds no run, or if there are too many."""
    console = console or Console()
    if not 2 <= len(runs) <= len(COLOURS):
        raise ConfigError(
            f"{len(runs)} runs were named; compare takes two to {len(COLOURS)} (headrace board overlays more)"
        )
    named = dict(zip(_names(runs), runs, strict=True))
    for run in runs:
        if not (run / METRICS).is_file():
            raise ConfigError(f"{run} is not the directory of a run: it has no {METRICS}")
    data = {name: _read(run) for name, run in named.items()}
    if page:
        if page.suffix != ".html":
            raise ConfigError(f"--html {page}: name a file that ends in .html")
        replace_file(page, comparison_page(data).encode(), flush=False)
        console.print(str(page))
        return 0
    _settings(named, console)
    _numbers(data, console)
    _curves(data, console)
    return 0


def _read(run: Path) -> ComparedRun:
    data = load(run)
    return ComparedRun(data, judge(data.state, read_live(run), held(run), time.time()).life)


def _names(runs: Sequence[Path]) -> list[str]:
    """Returns the directories' own names, or whole paths if two have the same."""
    short = [run.resolve().name for run in runs]
    if len(set(short)) == len(short):
        return short
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("one run was named twice; compare takes different runs")
    return [str(run) for run in runs]


def _settings(runs: Mapping[str, Path], console: Console) -> None:
    apart = settings_apart(runs)
    if not apart:
        console.print(Text("these runs have the same settings", "dim"))
        return
    drawn = FittedTable(texts("setting", *runs))
    for name, values in apart.items():
        drawn.add_row(name, *values)
    console.print(drawn)


def _numbers(data: Mapping[str, ComparedRun], console: Console) -> None:
    drawn = FittedTable([*texts(""), *numbers(*data)])
    for name, values in compared_numbers(list(data.values())).items():
        drawn.add_row(name, *values, style="" if len(set(values)) > 1 else "dim")
    console.print()
    console.print(drawn)


def _curves(data: Mapping[str, ComparedRun], console: Console) -> None:
    """Prints a line of blocks for each run, drawn on one scale of values and one of steps."""
    widest = max(len(name) for name in data)
    longest = max(len(run.data.state.rows) for run in data.values())
    beside = console.width - widest - BESIDE >= NARROWEST
    most = max(1, min(CURVE, console.width - widest * beside - BESIDE))
    between = "  " if beside else "\n    "
    for curve in CURVES[:3]:
        lines = {name: [curve.value(row) for row in run.data.state.rows] for name, run in data.items()}
        finite = [value for line in lines.values() for value in line if math.isfinite(value)]
        if not finite:
            continue
        within = min(finite), max(finite)
        head = f"\n{curve.title}, {number(within[0])} to {number(within[1])} "
        console.print(Text(head).append(f"({curve.note})", "dim"))
        for name, line in lines.items():
            width = max(1, round(most * len(line) / longest)) if line else 0
            last = next((value for value in reversed(line) if math.isfinite(value)), math.nan)
            drawn = sparkline(line, width, within)
            console.print(f"  {name.ljust(widest)}{between}{drawn.ljust(most)}  {number(last)}", soft_wrap=True)
