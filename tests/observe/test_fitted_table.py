"""Tables at every width: no number is cut, nothing is too wide, and a pipe has all of it on one line a row."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.commands.show.compare import compare, list_runs
from headrace.commands.show.diff import report
from headrace.commands.show.inspect import inspect
from headrace.views.screen.console import Console
from headrace.views.screen.layout import FittedTable, TableColumn
from support.fact_stream import write_run

WIDTHS = [60, 80, 120]
NAME = "qwen3-4b-lora-r16-1e5"


def console_of(width: int | None) -> Console:
    """`width`: None for a pipe."""
    return Console(file=io.StringIO(), **({"width": width} if width else {}))


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables") / "runs"
    for seed, name in enumerate(["demo", NAME, "third"]):
        write_run(root / name, seed=seed, end=seed != 1, config=f"[train]\nlr = {0.1 + seed * 0.2!r}\n")
    return root


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("width", [*WIDTHS, None])
def test_the_list_of_runs_has_name_state_step_and_reward_at_every_width(runs: Path, width: int | None) -> None:
    console = console_of(width)
    list_runs(runs, console=console)
    lines = printed(console).splitlines()
    assert max(map(len, lines)) <= (width or 200)
    for name, state in (("demo", "finished"), (NAME, "died while"), ("third", "finished")):
        line = next(line for line in lines if line.startswith(f"{name} "))
        assert re.search(rf"{state} .*\b30 of 30  +0\.\d\d\d\b", line), line
        assert width == 60 or re.search(r" broken " if name == NAME else r" learning ", line), line
    heads = " ".join(lines[:2])
    assert all(word in heads for word in ("run", "state", "step", "reward"))
    every = all(word in heads for word in ("took", "changed"))
    assert every != any("no room for" in line for line in lines), "what is left out is said"
    assert every == (width not in (60, 80))
    if width is None:
        assert len(lines) == 4


@pytest.mark.parametrize("width", [*WIDTHS, None])
def test_no_number_of_a_comparison_is_cut(runs: Path, width: int | None) -> None:
    console = console_of(width)
    names = [runs / "demo", runs / NAME, runs / "third"]
    compare(names, console=console)
    wide = console_of(400)
    compare(names, console=wide)
    text = printed(console)
    assert "…" not in text and (width is None or max(map(len, text.splitlines())) <= width)
    cells = [re.split(r" {2,}", line.strip())[1:] for line in printed(wide).splitlines() if not set(line) & set("▁▄█")]
    numbers = {cell for row in cells for cell in row if cell and re.fullmatch(r"[\d.,:%± of-]+", cell)}
    assert len(numbers) > 20 and "0.5" in numbers
    assert [one for one in numbers if one not in text] == []


@pytest.mark.parametrize("width", [*WIDTHS, None])
@pytest.mark.parametrize("command", ["diff", "inspect"])
def test_no_number_of_the_other_tables_is_cut(runs: Path, command: str, width: int | None) -> None:
    console = console_of(width)
    if command == "diff":
        report(runs / "demo", runs / "third", console=console)
    else:
        inspect(runs / "demo", tokens=True, console=console)
    text = printed(console)
    assert not re.search(r"\d…", text)
    assert width is None or max(map(len, text.splitlines())) <= width


def test_five_runs_with_long_names_go_beneath_each_other(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{NAME}-{seed}", seed=seed) for seed in range(5)]
    console = console_of(60)
    compare(runs, console=console)
    lines = printed(console).splitlines()
    assert max(map(len, lines)) <= 60 and sum(line.startswith("mean lag") for line in lines) == 2
    assert sum(line.count("30 of 30") for line in lines) == 5


def test_columns_of_a_pipe_are_those_that_the_environment_names(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console = console_of(None)
    list_runs(runs, console=console)
    assert max(map(len, printed(console).splitlines())) <= 60


COLUMN = st.builds(
    TableColumn,
    title=st.sampled_from(["", "x", "held out", "gradient norm", "a-name-without-any-space-in-it"]),
    number=st.booleans(),
    whole=st.sampled_from([12, 28]),
    spare=st.integers(0, 3),
)
TEXT = st.lists(st.sampled_from(["a", "word", "longer-words-here", "日本語", "0.25"]), max_size=6).map(" ".join)


@given(st.data())
def test_drawn_tables_fit_and_keep_every_number_whole(data: st.DataObject) -> None:
    columns = [TableColumn(title="name"), *data.draw(st.lists(COLUMN, min_size=1, max_size=7))]
    numbers = st.integers(0, 10**9).map(lambda value: f"{value:,}")
    rows = [
        [f"row{place}", *(data.draw(numbers if column.number else TEXT) for column in columns[1:])]
        for place in range(data.draw(st.integers(1, 4)))
    ]
    width = data.draw(st.integers(28, 130))
    table = FittedTable(columns)
    for row in rows:
        table.add_row(*row)
    console = console_of(width)
    console.print(table)
    lines = printed(console).splitlines()
    assert max(Console(width=500).render_str(line).cell_len for line in lines) <= width
    said = re.split(r"[\s|]+", printed(console))
    for place, column in enumerate(columns):
        if column.number and not column.spare:
            assert all(row[place] in said for row in rows)
    whole = console_of(None)
    whole.print(table)
    assert len(printed(whole).splitlines()) == len(rows) + 1
    assert all(cell in printed(whole) for row in rows for cell in row)
