"""The output of `headrace doctor --parity`: a table of differences, their limits, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.status import Status

from headrace.commands.installed.parity import DTYPES, LIMITS, Dtype, ParityRow, measure
from headrace.models.resolve import resolve_model
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, numbers, texts

COLUMNS = (
    *texts("dtype", "engine", "sampling", "replayed in the trainer"),
    *numbers("tokens", "mean", "p99", "max"),
    *texts(""),
)


def report(model: str, dtypes: Sequence[Dtype] = DTYPES, console: Console | None = None) -> int:
    """Measures and prints. Returns 0 if engine and trainer agree, else 1. `model`: a directory or a known name."""
    console = console or Console()
    directory = (
        Path(model) if (Path(model) / "config.json").is_file() else resolve_model(model)
    )  # no tokenizer is needed
    found: list[ParityRow] = []
    _silence_progress_bars()
    with console.status(Text(f"{Path(model).name}: publishing, sampling, scoring ...")) as status:
        for one in measure(directory, dtypes):
            found.append(one)
            _progress(status, found)
    console.print(
        Text("|Δ log-prob| between engine and trainer, nats", "bold").append(f" · {Path(model).name}", "not bold")
    )
    console.print(table(found))
    return _verdict(found, console)


def _silence_progress_bars() -> None:
    """transformers draws a progress bar for every model that it loads, over our own status line."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _progress(status: Status, found: Sequence[ParityRow]) -> None:
    status.update(Text(f"{len(found)} rows, the last: {found[-1].dtype} {found[-1].path} {found[-1].sampling} ..."))


def table(found: Sequence[ParityRow]) -> FittedTable:
    drawn = FittedTable(COLUMNS)
    for one in found:
        drawn.add_row(*_cells(one), style="" if one.judged else "dim")
    return drawn


def _cells(one: ParityRow) -> tuple[str | Text, ...]:
    if one.absent:
        return (one.dtype, one.path, one.sampling, "", "", "", "", "", "not here")
    numbers = (f"{value:.5f}" for value in (one.mean, one.p99, one.largest))
    return (one.dtype, one.path, one.sampling, one.replayed, str(one.tokens), *numbers, _mark(one))


def _mark(one: ParityRow) -> str | Text:
    if not one.judged:
        return "for comparison"
    return Text("✓", "green") if one.ok else Text("✗ too far", "bold red")


def _verdict(found: Sequence[ParityRow], console: Console) -> int:
    dtypes = dict.fromkeys(one.dtype for one in found)
    limits = "; ".join(f"{name}: mean {LIMITS[name][0]:g}, p99 {LIMITS[name][1]:g}" for name in dtypes)
    console.print(Text(f"\nLimits of what rounding can cause: {limits}.", "dim"))
    bad = [one for one in found if not one.ok]
    judged = [one for one in found if one.judged]
    if bad:
        where = ", ".join(dict.fromkeys(f"{one.path} in {one.dtype}" for one in bad))
        console.print(
            Text("Engine and trainer do not compute the same policy:", "bold red").append(
                f' {where}. Set engine.path to one that agrees ("hf" is Hugging Face\'s own forward), and please report it.',
                "default not bold",
            )
        )
    elif not judged:
        console.print(Text("Nothing could be measured: no engine path serves this model here.", "bold red"))
    else:
        console.print(Text("Engine and trainer agree.", "green"))
    return 1 if bad or not judged else 0
