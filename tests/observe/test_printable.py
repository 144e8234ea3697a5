"""Texts of users on their way to the terminal: it obeys nothing in them, and rich reads no markup in them, in any view."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rich.text
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table

from headrace.core import printing
from headrace.core.errors import ConfigError
from headrace.core.printing import PrintableBytes, printable, printable_json
from headrace.facts.facts import Fact, FirstFailure, FirstText, MemberMoved, Planned, RunStarted, Warned, WorkerLost
from headrace.facts.index_file import NumbersIndex
from headrace.facts.recorder import Recorder
from headrace.processes.health.live_status import LiveStatus, write_live
from headrace.views.screen import terminal
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FittedTable, texts
from headrace.views.screen.summary import print_summary
from headrace.views.screen.terminal import TerminalBoard, as_html
from support.fact_stream import FactStream, records_of, write_journal
from support.pseudo_terminal import POISON, SURROGATE, in_terminal, is_unsafe, obeyed

ROOT = Path(__file__).resolve().parents[2]

ANY = st.text(st.characters(), max_size=40) | st.text(st.sampled_from(POISON + SURROGATE + "a \n\t"), max_size=40)
"""Any text, surrogates included."""


def sent(*shown: Any) -> str:
    """What a terminal of 80 columns is sent."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    for one in shown:
        console.print(one)
    return console.file.getvalue().replace("\n", "\r\n")  # type: ignore[attr-defined]


# --- the guard -----------------------------------------------------------------------------------------------------------


@given(ANY)
def test_what_is_printable_steers_nothing_and_has_the_same_length(text: str) -> None:
    shown = printable(text)
    assert not any(map(is_unsafe, shown)) and len(shown) == len(text)
    shown.encode()
    assert printable(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "tab\tand\nline",
        "naïve Straße",
        "日本語\u3000全角",
        "می‌خواهم",
        "👨‍👩‍👧 🏳️‍🌈",
        "e\u0301",
        "x\u00a0y\u202f%",
        "±→·✓▁█",
        "␛",
    ],
)
def test_scripts_emoji_and_spaces_stay(text: str) -> None:
    assert printable(text) == text


def test_what_is_replaced_is_still_seen() -> None:
    assert printable("a\x1b[2J\rb\x07\x7f\u202e\x9b\ud800") == "a␛[2J␍b␇␡���"


def test_no_progress_bar_is_drawn_on_a_guarded_stream() -> None:
    """A bar would be a line of pictures: its CR does not lead back."""
    draw = """
from headrace.core.printing import guard_streams
guard_streams()
from huggingface_hub.utils import tqdm as of_the_hub
from transformers.utils.logging import tqdm as of_transformers
for bar in (of_the_hub, of_transformers):
    list(bar(range(3), desc="Loading weights"))
"""
    done = subprocess.run([sys.executable, "-c", draw], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("guarded", [True, False])
def test_what_an_encoding_lacks_is_an_escape_and_ends_no_command(guarded: bool) -> None:
    """A terminal of Latin-1 has neither the marks of a table nor an ellipsis."""
    show = """
from headrace.core.printing import echo, guard_streams
from headrace.views.screen.console import Console
if GUARDED:
    guard_streams()
echo("é ✓"), echo("é …", err=True)
Console(width=40).print("é –")
""".replace("GUARDED", str(guarded))
    latin = os.environ | {"PYTHONIOENCODING": "latin-1:strict"}
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, cwd=ROOT, env=latin)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\xe9 \\u2713\n\xe9 \\u2013\n", b"\xe9 \\u2026\n")


@given(ANY)
def test_json_stays_the_same_value(text: str) -> None:
    shown = printable_json(json.dumps({text: [text]}, ensure_ascii=False, indent=1))
    assert not any(map(is_unsafe, shown)) and json.loads(shown) == {text: [text]}


@given(ANY)
def test_a_drawn_text_steers_no_view_and_is_no_markup(text: str) -> None:
    table, fitted = Table(), FittedTable(texts("a", text))
    table.add_column(text)
    table.add_row(text)
    table.add_row(Text(text, "red"))
    fitted.add_row(text, Text(text, "red"))
    views = [
        text,
        Text(text, "bold red"),
        Text("a").append(text, "green"),
        table,
        fitted,
        Panel(Text(text), title=Text(text)),
    ]
    assert obeyed(sent(*views, rich.text.Text(text))) == [], "the last as a library prints in a live view"
    assert not any(map(is_unsafe, as_html(Text(text))))


@pytest.mark.parametrize(
    "words", ["[red]x[/red]", "[/]", "[bold", "\\[x]", ":fire: :smile:", "[link=http://x]y[/link]", "[@click=f]z"]
)
def test_markup_and_names_of_emoji_are_words(words: str) -> None:
    table = FittedTable(texts(words))
    table.add_row(words)
    assert sent(words) == f"{words}\r\n" and sent(table).count(words) == 2 and words in sent(Panel(Text(words)))


def test_columns_are_as_wide_as_what_is_shown() -> None:
    cell = "\x1b\x1b\x1b\x07" * 2
    fitted, table = FittedTable(texts("a", "b")), Table("a", "b", box=None, padding=(0, 2, 0, 0))
    for one in (fitted, table):
        one.add_row(cell, "next")
        one.add_row("four", "next")
        console = Console(file=io.StringIO(), width=80)
        console.print(one)
        lines = console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
        assert [line.index("next") for line in lines] == [10, 10]


def test_our_colours_arrive_though_the_stream_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    beneath = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printing.PrintableStream(beneath))
    Console(force_terminal=True, color_system="standard", width=40).print(Text("\x1b[2J", "red"))
    print("\x1b[2J", end="")
    assert beneath.getvalue() == "\x1b[31m␛[2J\x1b[0m\n␛[2J"


@given(st.text(st.sampled_from("aé日👨\x1b\u202e\x9b")), st.integers(1, 3))
def test_characters_in_pieces_are_whole_again(text: str, size: int) -> None:
    ours, theirs = os.pipe()
    stream, data = PrintableBytes(theirs), text.encode()
    for at in range(0, len(data), size):
        stream.write(data[at : at + size])
    os.close(theirs)
    with os.fdopen(ours, "rb") as read:
        assert read.read().decode() == printable(text)


def test_a_message_of_ours_steers_nothing_where_the_interpreter_prints_it() -> None:
    assert not any(map(is_unsafe, str(ConfigError(POISON + SURROGATE))))


OTHERS = """
import logging, sys, threading, warnings
from support.pseudo_terminal import POISON, SURROGATE
from headrace.core.printing import guard_streams
guard_streams()
TEXT = POISON + SURROGATE
print(TEXT)
sys.stderr.writelines([TEXT, "\\n"])
logging.getLogger("a.library").error("said %s", TEXT)
logging.basicConfig()
logging.getLogger("a.library").error("said %s", TEXT)
warnings.warn(TEXT)
thread = threading.Thread(target=lambda: 1 / 0, name=TEXT)
thread.start()
thread.join()
raise ValueError(TEXT)
"""


def test_what_libraries_loggers_and_the_interpreter_print_steers_nothing(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    code, out = in_terminal([sys.executable, "-c", OTHERS], tmp_path, {"PYTHONPATH": paths})
    assert code == 1 and obeyed(out) == [] and out.count("␛[2J") >= 7


@pytest.mark.parametrize(
    "program",
    ["cli.py", "run/worker/worker.py", "processes/obeying.py", "processes/health/monitor.py"],
)
def test_processes_that_print_what_others_wrote_guard_their_streams(program: str) -> None:
    calls = [ast.unparse(node) for node in ast.walk(ast.parse((ROOT / "headrace" / program).read_text()))
             if isinstance(node, ast.Call)]  # fmt: skip
    assert "guard_streams()" in calls


def test_our_messages_steer_nothing_in_a_process_of_the_user_s(capsys: pytest.CaptureFixture[str]) -> None:
    """Where `headrace.train` is called from Python, the streams are not ours."""
    printing.echo(POISON)
    printing.say(POISON + SURROGATE)
    try:
        raise ValueError(POISON)
    except ValueError:
        printing.echo_traceback()
    out, err = capsys.readouterr()
    assert not any(map(is_unsafe, out + err)) and (out + err).count("␛[2J") == 3


def test_a_result_that_nobody_reads_on_ends_the_command_without_a_traceback() -> None:
    code = "from headrace.core.printing import echo\nfor _ in range(20000): echo('x' * 80)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 1


# --- the views of a run ----------------------------------------------------------------------------------------------------

PLACES = {
    "prompt",
    "text",
    "detail",
    "message",
    "traceback",
    "prompt_id",
    "id",
    "how",
    "why",
    "headline",
    "chosen",
    "error",
}
"""Fields of facts and records that hold texts of users."""


def poisoned(value: Any, here: bool = False) -> Any:
    """The same facts with poison wherever a user's text may be."""
    if isinstance(value, str):
        return value + POISON if here else value
    if isinstance(value, (list, tuple)):
        return type(value)(poisoned(one, here) for one in value)
    if isinstance(value, dict):
        return {key: poisoned(one, here) for key, one in value.items()}
    if isinstance(value, msgspec.Struct):
        fields = {name: poisoned(getattr(value, name), name in PLACES) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value


def facts_of(seed: int) -> Iterator[Fact]:
    facts = list(FactStream(steps=4, groups=2, tokens=5, seed=seed).facts())
    for fact in facts[:-1]:
        yield poisoned(fact)
        if isinstance(fact, RunStarted):
            yield poisoned(msgspec.structs.replace(fact, chosen={"placement": "so"}))
            yield poisoned(Planned(0.5, 4, "more steps"))
            yield poisoned(FirstText(0.6, "prompt", "text", 4, "stop", 0))
            yield poisoned(
                FirstFailure(0.7, "reward_raised", "KeyError", "detail", "Traceback:\n  one\nKeyError: x", "id")
            )
            yield poisoned(Warned(0.8, "a warning"))
            yield poisoned(WorkerLost(0.9, "engine", "was lost", 1))
    yield msgspec.structs.replace(facts[-1], reason=f"the reward raised {POISON}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("poisoned") / "runs"
    for seed, name in enumerate(["one", f"two {POISON}".replace("/", "|")]):
        run = root / name
        run.mkdir(parents=True)
        facts = list(facts_of(seed))
        recorder = Recorder(run, index=NumbersIndex(run))
        for fact in facts:
            recorder.record(fact)
        recorder.close()
        write_journal(run, records_of(facts))
        tricky = json.dumps(POISON).replace("\\u007f", "\\u007F")
        (run / "config.toml").write_text(f"seed = {seed}\n[model]\npath = {tricky}\n[task]\npath = {tricky}\n")
    return root


COMMANDS: list[list[str]] = [
    ["ls", "."],
    ["ls", ".", "--json"],
    ["status", "one"],
    ["status", "OTHER"],
    ["status", "OTHER", "--json"],
    ["status", "OTHER", "--stacks"],
    ["inspect", "OTHER"],
    ["inspect", "OTHER", "--tokens"],
    ["inspect", "OTHER", "--json"],
    ["inspect", "OTHER", "--ticket", "12345"],
    ["compare", "one", "OTHER"],
    ["diff", "one", "OTHER"],
    ["report", "OTHER"],
    ["replay", "OTHER", "--step", "1"],
    ["train", "--resume", "OTHER"],
    ["train", "bad.toml", "--dry-run"],
    ["export", "OTHER", "--to", POISON.replace("/", "|")],
    ["pool", "OTHER"],
    ["plan", "OTHER"],
    ["status", POISON],
    [POISON],
    ["ls", "--set", POISON],
]

ALL = """
import json, sys
from headrace import cli
for words in json.loads(sys.argv[1]):
    try:
        cli.main(words)
    except SystemExit:  # argparse
        pass
    print(words[-1])  # as a library does in the process of a command
raise ValueError(words[-1])  # a bug
"""


@pytest.mark.slow
@pytest.mark.parametrize("piped", [False, True])
def test_no_command_that_looks_at_a_run_sends_what_the_run_holds(runs: Path, piped: bool) -> None:
    other = next(path.name for path in runs.iterdir() if path.name.startswith("two"))
    (runs / "bad.toml").write_text(f"{json.dumps(POISON)} = 1\n")
    words = [[other if word == "OTHER" else word for word in command] for command in COMMANDS]
    command = [sys.executable, "-c", ALL, json.dumps(words)]
    if piped:
        done = subprocess.run(command, cwd=runs, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
        out = (done.stdout + done.stderr).decode()
        assert "\x1b" not in out
    else:
        out = in_terminal(command, runs, {"PYTHONPATH": str(ROOT)})[1]
        assert "\x1b[1m" in out, "ours are coloured"
    assert obeyed(out) == [] and out.count("␛[2J") > 50
    assert "[red]kept[/red]" in out and ":fire:" in out and "🔥" not in out


def test_json_of_a_run_has_what_the_run_holds(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "inspect", str(runs / "one"), "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["rollouts"][0]["prompt"].endswith(POISON)


@pytest.mark.parametrize("view", ["live", "plain", "board", "plain board", "summary", "html"])
def test_no_view_of_a_run_under_way_sends_what_the_run_holds(
    view: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), width=80, height=50, force_terminal=True, color_system="truecolor")
    recorder = Recorder(tmp_path)
    name = f"lane {POISON}"
    board = TerminalBoard([name], "plain" if view == "plain board" else "live", console) if "board" in view else None
    sink: Any = board.lane(name) if board else terminal.LiveTerminal(console) if view == "live" else None
    sink = terminal.PlainTerminal(console) if view == "plain" else sink
    for fact in facts_of(0):
        recorder.record(fact)
        if sink:
            sink.record(fact, recorder.state)
            console.print(Text("") if not board else board._view()) if view == "board" else None
    if view == "live":
        console.print(sink._view())
    if sink:
        sink.close()
    if board:
        board.close()
    if view == "summary":
        print_summary(recorder.state, tmp_path / f"{name}.html", console)
    recorder.close()
    out = console.file.getvalue()  # type: ignore[attr-defined]
    if view == "html":
        out = as_html(terminal.frame(recorder.state)).replace("&#27;", "\x1b")
    assert obeyed(out.replace("\n", "\r\n"), live=view in ("live", "board")) == []
    assert "␛[2J" in out and "🔥" not in out


def test_the_status_of_a_running_run_sends_nothing_either(tmp_path: Path) -> None:
    live = LiveStatus(pid=1, written=time.time(), workers={f"engine {POISON}": 2}, verdict=POISON, picture=POISON)
    write_live(tmp_path, live)
    recorder = Recorder(tmp_path)
    for fact in list(facts_of(1))[:-1]:
        recorder.record(fact)
    recorder.record(MemberMoved(99.0, "http://x", "lost", POISON, 0, 0, 0))
    recorder.close()
    (tmp_path / "config.toml").write_text("")
    for words in (["status", "."], ["status", ".", "--json"]):
        out = in_terminal([sys.executable, "-m", "headrace", *words], tmp_path, {"PYTHONPATH": str(ROOT)})[1]
        assert obeyed(out) == [] and "2J" in out
