"""`headrace ls [RUNS_DIR]`: the runs of a directory, each with its state, its step, its last reward and its cost."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from headrace.core.errors import ConfigError
from headrace.core.printing import echo, printable_json
from headrace.facts.costs import dollars
from headrace.facts.texts import clip, duration
from headrace.run.run_directory import held
from headrace.views.board.followed_run import RunLine, RunList
from headrace.views.screen.console import Console
from headrace.views.screen.layout import FittedTable, TableColumn

STATE = 48
"""Characters of a state; headrace status shows all of it."""

COLUMNS = (
    TableColumn(title="run", whole=28),
    TableColumn(title="state"),
    TableColumn(title="step", number=True),
    TableColumn(title="reward", number=True),
    TableColumn(title="held out", number=True, spare=1),
    TableColumn(title="took", number=True, spare=3),
    TableColumn(title="cost", number=True, spare=2),
    TableColumn(title="changed", number=True, spare=4),
)


def list_runs(directory: Path, as_json: bool = False, console: Console | None = None) -> int:
    """Prints the runs, the newest first. Raises ConfigError if there is no such directory."""
    console = console or Console()
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is no directory; runs are kept in runs/ unless out says otherwise (headrace train makes it)"
        )
    lines = RunList(directory, held).lines()
    if as_json:
        echo(printable_json(msgspec.json.format(msgspec.json.encode(lines), indent=2).decode()))
        return 0
    if not lines:
        console.print(f"{directory} holds no run yet; headrace train CONFIG.toml starts one")
        return 0
    priced = any(one.cost is not None for one in lines)
    drawn = FittedTable([one for one in COLUMNS if priced or one.title != "cost"])
    for one in lines:
        drawn.add_row(*_cells(one, priced), style="bold" if one.living else "")
    console.print(drawn)
    return 0


def _cells(one: RunLine, priced: bool) -> tuple[str, ...]:
    return (
        one.name,
        clip(one.words, STATE),
        f"{one.step:,} of {one.steps:,}" if one.steps else f"{one.step:,}",
        "–" if one.reward is None else f"{one.reward:.3f}",
        "–" if one.held_out is None else f"{one.held_out:.3f}",
        duration(one.seconds),
        *(["–" if one.cost is None else dollars(one.cost)] * priced),
        _day(one.changed),
    )


def _day(seconds: float) -> str:
    """`11-28 13:05` in this year, else `2024-11-28`."""
    then = time.localtime(seconds)
    return time.strftime("%m-%d %H:%M" if then.tm_year == time.localtime().tm_year else "%Y-%m-%d", then)
