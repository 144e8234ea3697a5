"""Makes docs/gpu_queue.md's tables, and the planner's measured rates, of what machines with a GPU have measured (benchmarks/device/results): `make docs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.device.entry import (  # noqa: E402
    BASIS,
    ORDER,
    Entry,
    Line,
    Result,
    all_results,
    chip_of,
    entry_of,
    verdict,
    written,
)
from headrace.commands.plan.rates.hardware import GPUS  # noqa: E402

TARGET = Path(__file__).with_name("gpu_queue.md")
RATES = ROOT / "headrace/commands/plan/rates/own_runs.json"
BEGIN, END = "<!-- device: `make docs` -->\n", "<!-- end of device -->"
PREDICTED = ("h100", "h200")
"""Cards for which the page shows the predictions."""
NONE = "–"
"""Stands where nothing is measured, and where nothing is predicted."""
LONG = 40
"""A formula of more characters stands once in a table."""


def tables(results: list[Result]) -> Iterator[str]:
    for number, name in enumerate(ORDER, 1):
        entry = entry_of(name)
        mine = {chip_of(result.card) or result.card: result for result in results if result.entry == name}
        yield f"\n## {number}. {name}\n\n{entry.about[0].upper()}{entry.about[1:]}.\n"
        yield from _table(entry, list(mine.values()))


def _table(entry: Entry, results: list[Result]) -> Iterator[str]:
    """`results`: the newest of each card. Without any, the figures are a list."""
    cards = [
        f"measured: {chip_of(result.card).upper() or result.card}, {result.date}, `{result.commit}`"
        for result in results
    ]
    heads = ["figure", f"predicted: {'; '.join(key.upper() for key in PREDICTED)}", *cards, "by"]
    written_out: dict[str, str] = {}
    unasked = [
        line for line in entry.lines if line.unit == "check" and not any(one.figure(line.name) for one in results)
    ]
    shown = [line for line in entry.lines if line not in unasked]
    if shown and results:
        yield f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|"
    above = ""
    for line in shown:
        found = [_cell(line, result) for result in results]
        formula = "the same" if line.formula == above else _formula(line.formula, written_out)
        above = line.formula
        if results:
            yield f"| {' | '.join([line.name, _predicted(line), *found, formula])} |"
        else:
            yield f"- {line.name}: {_predicted(line)} ({formula})"
        written_out.setdefault(line.formula, line.name)
    for result in results:
        if result.ended not in ("finished", BASIS):
            yield f"\n{chip_of(result.card).upper() or result.card}: {result.ended}."
    if unasked:
        yield f"\nRight or wrong, on no card yet: {'; '.join(_checks(unasked))}."


def _checks(lines: list[Line]) -> Iterator[str]:
    """Names of checks, with what is to be seen once for all that share it."""
    for formula in dict.fromkeys(line.formula for line in lines):
        yield f"{', '.join(f'*{line.name}*' for line in lines if line.formula == formula)} ({formula})"


def _formula(formula: str, written_out: dict[str, str]) -> str:
    """`written_out`: formulas of the table so far, with the names of their lines, one of which stands for what is long."""
    for known in sorted(written_out, key=len, reverse=True):
        if len(known) > LONG and formula.startswith(known):
            return f"as for *{written_out[known]}*{formula.removeprefix(known)}"
    return formula


def _predicted(line: Line) -> str:
    """The prediction for each card, once if they have the same; the unit follows the last one."""
    if line.unit == "check":
        return "yes"
    if not line.predicted:
        return NONE
    cards = list(dict.fromkeys(written(line.predicted(GPUS[key]), line.unit) for key in PREDICTED))
    return "; ".join([*(one.partition(" ")[0] for one in cards[:-1]), cards[-1]])


def _cell(line: Line, result: Result) -> str:
    figure = result.figure(line.name)
    if figure is None:
        return NONE
    if figure.value is None:
        return verdict(line, figure, result.chip)
    share = "" if figure.share is None else f", {figure.share:.1%} of the peak"
    told = "" if result.ended == BASIS else f": {verdict(line, figure, result.chip)}"
    return f"**{written(figure.value, line.unit)}**{share}{told}"


def page(text: str, results: list[Result]) -> str:
    """Returns the page with the current tables. Raises ValueError if a mark is missing."""
    before, rest = text.split(BEGIN)
    made = "\n".join(tables(results))
    return f"{before}{BEGIN}{made}\n{END}{rest.split(END)[1]}"


def rates(results: list[Result]) -> str:
    """Returns the planner's table (`own_runs.py`): what each result says of a model's passes and steps."""
    made: list[dict[str, Any]] = []
    for result in results:
        found: dict[str, dict[str, Any]] = {}
        for measured in [figure.rates for figure in result.figures if figure.rates and chip_of(result.card)]:
            where = {"card": chip_of(result.card), "date": result.date, "commit": result.commit}
            of = found.setdefault(measured["model"], {"model": measured["model"], **where, "passes": [], "steps": []})
            if "pass" in measured:
                of["passes"].append([measured["sequences"], measured["context"], measured["pass"]])
            else:
                of["steps"].append([measured["tokens"], measured["step"]])
        made += found.values()
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    everything = all_results()
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8"), everything), encoding="utf-8")
    RATES.write_text(rates(everything), encoding="utf-8")
