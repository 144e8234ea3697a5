"""The output of `headrace diff RUN_A RUN_B`: settings that differ, the earliest difference, and the first one of every kind."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.commands.looking.diff import KINDS, RunComparison, compare_runs
from headrace.observe.texts import clip, plural


def report(a: Path, b: Path, console: Console | None = None) -> int:
    """Prints the comparison. Returns 0 if the journals are equal; 1 if they differ or cannot be read completely."""
    console = console or Console(highlight=False)
    found = compare_runs(a, b)
    console.print(f"A = {escape(str(a))}, B = {escape(str(b))}: {plural(found.steps, 'step')} in both")
    if found.settings:
        console.print(_settings(found))
    for run, damage in found.damage.items():
        if damage:
            console.print(
                f"[yellow]Parts of {escape(str(run))} cannot be read and are not compared: {escape(str(damage))}[/]"
            )
    if earliest := found.earliest:
        kind = KINDS[earliest.kind]
        console.print(f"[bold]The first difference is at {escape(earliest.place) or 'the start'}[/]: {kind}, "
                      f"{escape(_clipped(earliest.a))} | {escape(_clipped(earliest.b))}")  # fmt: skip
        console.print(_kinds(found))
        return 1
    if any(found.damage.values()):
        console.print("The readable parts of both are the same")
        return 1
    console.print("[green]Prompts, tokens, log-probs, versions, rewards, advantages, masks and reports are the same[/]")
    return 0


def _settings(found: RunComparison) -> Table:
    table = _table("setting", "A", "B")
    for name, a, b in found.settings:
        table.add_row(escape(name), *(escape("-" if one is None else str(one)) for one in (a, b)))
    return table


def _kinds(found: RunComparison) -> Table:
    table = _table("", "first difference", "A", "B", "in all")
    for kind, title in KINDS.items():
        one = found.first.get(kind)
        if one is None:
            table.add_row(title, "[green]none[/]")
        else:
            sides = (escape(_clipped(side)) for side in (one.a, one.b))
            table.add_row(title, escape(one.place), *sides, f"{found.counts[kind]:,}")
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name == "in all" else "left", overflow="fold")
    return table


def _clipped(text: str) -> str:
    return clip(text, 60)
