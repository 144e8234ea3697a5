"""The output of `headrace doctor --parity`: a table of differences, their limits, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from headrace.commands.installed.parity import DTYPES, LIMITS, Dtype, ParityRow, measure
from headrace.models.resolve import resolve_model

COLUMNS = ("dtype", "engine", "sampling", "replayed in the trainer", "tokens", "mean", "p99", "max", "")


def report(model: str, dtypes: Sequence[Dtype] = DTYPES, console: Console | None = None) -> int:
    """Measures and prints. Returns 0 if engine and trainer agree, else 1. `model`: a directory or a known name."""
    console = console or Console(highlight=False)
    directory = (
        Path(model) if (Path(model) / "config.json").is_file() else resolve_model(model)
    )  # no tokenizer is needed
    found: list[ParityRow] = []
    _silence_progress_bars()
    with console.status(f"{Path(model).name}: publishing, sampling, scoring ...") as status:
        for one in measure(directory, dtypes):
            found.append(one)
            _progress(status, found)
    console.print(f"[bold]|Δ log-prob| between engine and trainer, nats[/] · {escape(Path(model).name)}")
    console.print(table(found))
    return _verdict(found, console)


def _silence_progress_bars() -> None:
    """transformers draws a progress bar for every model that it loads, over our own status line."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _progress(status: Status, found: Sequence[ParityRow]) -> None:
    status.update(f"{len(found)} rows, the last: {found[-1].dtype} {escape(found[-1].path)} {found[-1].sampling} ...")


def table(found: Sequence[ParityRow]) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        drawn.add_column(name, justify="right" if name in ("tokens", "mean", "p99", "max") else "left")
    before = ""
    for one in found:
        if before and one.dtype != before:
            drawn.add_section()
        before = one.dtype
        drawn.add_row(*_cells(one), style="" if one.judged else "dim")
    return drawn


def _cells(one: ParityRow) -> tuple[str, ...]:
    if one.absent:
        return (one.dtype, escape(one.path), one.sampling, "", "", "", "", "", "not here")
    numbers = (f"{value:.5f}" for value in (one.mean, one.p99, one.largest))
    return (one.dtype, escape(one.path), one.sampling, one.replayed, str(one.tokens), *numbers, _mark(one))


def _mark(one: ParityRow) -> str:
    if not one.judged:
        return "for comparison"
    return "[green]✓[/]" if one.ok else "[bold red]✗ too far[/]"


def _verdict(found: Sequence[ParityRow], console: Console) -> int:
    dtypes = dict.fromkeys(one.dtype for one in found)
    limits = "; ".join(f"{name}: mean {LIMITS[name][0]:g}, p99 {LIMITS[name][1]:g}" for name in dtypes)
    console.print(f"\n[dim]Limits of what rounding can cause: {limits}.[/]")
    bad = [one for one in found if not one.ok]
    judged = [one for one in found if one.judged]
    if bad:
        where = ", ".join(dict.fromkeys(f"{one.path} in {one.dtype}" for one in bad))
        console.print(
            f"[bold red]Engine and trainer do not compute the same policy:[/] {escape(where)}. "
            'Set engine.path to one that agrees ("hf" is Hugging Face\'s own forward), and please report it.'
        )
    elif not judged:
        console.print("[bold red]Nothing could be measured:[/] no engine path serves this model here.")
    else:
        console.print("[green]Engine and trainer agree.[/]")
    return 1 if bad or not judged else 0
