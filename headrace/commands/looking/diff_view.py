"""The output of `headrace diff RUN_A RUN_B`: settings that differ, the earliest difference, and the first one of every kind."""

from __future__ import annotations

from pathlib import Path

from headrace.commands.looking.diff import KINDS, RunComparison, compare_runs
from headrace.facts.texts import clip, plural
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, numbers, texts


def report(a: Path, b: Path, console: Console | None = None) -> int:
    """Prints the comparison. Returns 0 if the journals are equal; 1 if they differ or cannot be read completely."""
    console = console or Console()
    found = compare_runs(a, b)
    console.print(f"A = {a}, B = {b}: {plural(found.steps, 'step')} in both")
    if found.settings:
        console.print(_settings(found))
    for run, damage in found.damage.items():
        if damage:
            console.print(Text(f"Parts of {run} cannot be read and are not compared: {damage}", "yellow"))
    if earliest := found.earliest:
        kind = KINDS[earliest.kind]
        head = Text(f"The first difference is at {earliest.place or 'the start'}", "bold")
        console.print(head.append(f": {kind}, {_clipped(earliest.a)} | {_clipped(earliest.b)}", "not bold"))
        console.print(_kinds(found))
        return 1
    if any(found.damage.values()):
        console.print("The readable parts of both are the same")
        return 1
    console.print(
        Text("Prompts, tokens, log-probs, versions, rewards, advantages, masks and reports are the same", "green")
    )
    return 0


def _settings(found: RunComparison) -> FittedTable:
    table = FittedTable(texts("setting", "A", "B"))
    for name, a, b in found.settings:
        table.add_row(name, *("-" if one is None else str(one) for one in (a, b)))
    return table


def _kinds(found: RunComparison) -> FittedTable:
    table = FittedTable([*texts("", "first difference", "A", "B"), *numbers("in all")])
    for kind, title in KINDS.items():
        one = found.first.get(kind)
        if one is None:
            table.add_row(title, Text("none", "green"), "", "", "")
        else:
            table.add_row(title, one.place, _clipped(one.a), _clipped(one.b), f"{found.counts[kind]:,}")
    return table


def _clipped(text: str) -> str:
    return clip(text, 60)
