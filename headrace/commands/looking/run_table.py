"""`headrace ls [RUNS_DIR]`: the runs of a directory, each with its state, its step, its last reward and its cost."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.errors import ConfigError
from headrace.observe.board.run_list import RunLine, RunList
from headrace.observe.costs import dollars
from headrace.observe.texts import clip, duration
from headrace.orchestration.store.run_directory import held

STATE = 48
"""Characters of a state; headrace status shows all of it."""


def list_runs(directory: Path, as_json: bool = False, console: Console | None = None) -> int:
    """Prints the runs, the newest first. Raises ConfigError if there is no such directory."""
    console = console or Console(highlight=False)
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is no directory; runs are kept in runs/ unless out says otherwise (headrace train makes it)"
        )
    lines = RunList(directory, held).lines()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(lines), indent=2).decode())
        return 0
    if not lines:
        console.print(f"{escape(str(directory))} holds no run yet; headrace train CONFIG.toml starts one")
        return 0
    drawn = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    priced = any(one.cost is not None for one in lines)
    for name in ("run", "state", "step", "reward", "held out", "took", *(["cost"] * priced), "changed"):
        drawn.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=name != "state")
    for one in lines:
        drawn.add_row(*map(escape, _cells(one, priced)), style="bold" if one.living else "")
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
        time.strftime("%Y-%m-%d %H:%M", time.localtime(one.changed)),
    )
