"""What people see at 80 columns: nothing that matters is cut off, and the height is used."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import RenderableType
from test_troubles import half_failed

from headrace.commands.show.inspect import inspect
from headrace.facts.facts import Fact, StepTrained, Warned
from headrace.facts.health import health
from headrace.facts.recorder import Recorder
from headrace.facts.records import summarise
from headrace.facts.run_state import RunState
from headrace.processes.health.live_status import LiveStatus, Status
from headrace.views.screen.console import Console
from headrace.views.screen.layout import distinct, flow, middle_out, without_marks
from headrace.views.screen.live import Text, frame, sample_panel
from headrace.views.screen.status_view import panel
from headrace.views.screen.summary import summary
from headrace.views.screen.terminal import LiveTerminal
from support.fact_stream import FactStream, records_of, write_journal

FACTS = list(FactStream(steps=30, groups=6).facts())
SIZES = [(80, 24), (80, 40), (120, 40)]
LONG = "The first of them is seven, and so " + "on and on, " * 30 + "therefore the answer is forty-two."


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    """Of a run that has troubles, still under way, with its samples."""
    recorder = Recorder(tmp_path)
    for fact in FACTS[:-1]:
        recorder.record(fact)
    recorder.close()
    return recorder.state


def shown(what: RenderableType, width: int, height: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def flat(text: str) -> str:
    """Without frames and line breaks: what is whole here was not cut off, only wrapped."""
    return " ".join(re.sub(r"[│╭╮╰╯─!]", " ", text).split())


def live(state: RunState, width: int, height: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    terminal = LiveTerminal(console)
    try:
        for fact in (state.started, state.rows[-1]):
            terminal.record(fact, state)  # type: ignore[arg-type]
        return shown(terminal._view(), width, height)
    finally:
        terminal.close()


# -- the live view ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_live_view_says_everything_whole_and_fills_its_height(state: RunState, width: int, height: int) -> None:
    text = live(state, width, height)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and height - 6 <= len(lines) < height
    report, ended = state.rows[-1].report, state.tickets
    told = flat(text)
    for words in (
        "SmolLM2-135M-Instruct, chain_sum, grpo",
        f"step {state.step}/30",
        "measuring held-out reward (after)",
        "Learning: held out 0.",
        f"clip {100 * report.clip_fraction:.0f} %",
        "running, 3 waiting, kv 41 %",
        f"of {state.started.slots} slots",  # type: ignore[union-attr]
        f"{ended.trained} trained",
        f"no_contrast {ended.dropped['no_contrast']}",
        "reward_timeout",
        f"checkpoint {state.checkpoints[-1].step}",
        "1 death",
        "a new one goes on with its 17 requests",
    ):
        assert words in told, words
    assert "…" not in text


@pytest.mark.parametrize(("width", "height", "least"), [(80, 24, 1), (80, 40, 3), (120, 40, 4)])
def test_the_rest_of_the_screen_has_samples(state: RunState, width: int, height: int, least: int) -> None:
    told = live(state, width, height)
    assert told.count("prompt  State the result and nothing else:") >= least and told.count("output  ") >= least


def test_samples_are_of_several_prompts_and_of_the_last_step(state: RunState) -> None:
    assert len(state.samples) == len({sample.prompt for sample in state.samples}) == 6
    assert {sample.step for sample in state.samples} == {state.rows[-1].report.step}


def test_a_sample_shows_the_right_answer_and_what_the_extractor_saw(state: RunState) -> None:
    more = {"answer": "42", "extracted": {"exact": "41"}}
    state.samples = [msgspec.structs.replace(sample, **more) for sample in state.samples]
    for width, height in SIZES:
        assert "extracted '41', right answer 42" in live(state, width, height)


def test_warnings_that_have_no_room_are_left_out_whole(state: RunState) -> None:
    state.warnings[:] = [Warned(1.0, f"{name} waits because {'of this and that, ' * 10}and ends") for name in "abc"]
    text = live(state, 80, 24)
    assert len(text.splitlines()) < 24 and flat(text).count("and ends") == text.count("waits because") >= 1


def test_advice_and_the_traceback_have_room_before_the_samples_and_nothing_overflows() -> None:
    state = half_failed()
    for width, height in SIZES:
        text = live(state, width, height)
        assert len(text.splitlines()) < height and "correct the reward, or the rows that it cannot read" in flat(text)
        assert "KeyError: '7'" in text


def test_what_is_said_again_and_again_is_shown_once() -> None:
    assert distinct(["a", "b", "a", "a", "c"], 2) == ["a (× 3)", "c"] and distinct([], 3) == []


def test_marks_beneath_a_line_are_left_out_where_it_may_be_wrapped() -> None:
    assert without_marks("  x = f(1)\n      ~^^^\nKeyError: 1") == "  x = f(1)\nKeyError: 1"


def test_a_warning_is_wrapped_and_not_cut_off(state: RunState) -> None:
    state.warnings[:] = [Warned(1.0, f"the trainer waits because {'of this and that, ' * 8}raise rollout.max_tokens")]
    assert "raise rollout.max_tokens" in flat(live(state, 80, 24))


@pytest.mark.parametrize("height", [5, 7, 12, 30])
def test_a_long_sample_keeps_its_beginning_and_its_end_in_the_lines_it_has(state: RunState, height: int) -> None:
    sample = msgspec.structs.replace(state.samples[0], text=LONG, stop="length")
    console = Console(file=io.StringIO(), width=80, color_system=None)
    text = shown(sample_panel(sample, console, 80, height), 80)
    assert len(text.splitlines()) <= height and "cut off" in text
    assert "The first of them is seven" in text
    assert ("therefore the answer is forty-two." in flat(text)) == (height > 5)


def test_parts_that_have_no_room_go_to_the_next_line() -> None:
    parts = [Text("one"), Text(""), Text("two"), Text("three")]
    assert flow(parts, 40).plain == "one   two   three"
    assert flow(parts, 9).plain == "one   two\nthree" and flow(parts, 2).plain == "one\ntwo\nthree"


@pytest.mark.parametrize("width", [10, 33, 80])
@pytest.mark.parametrize("text", [LONG, "漢字" * 200, "x" * 500, ""])
def test_no_line_is_wider_than_the_width_nor_are_there_more_than_asked_for(text: str, width: int) -> None:
    made = middle_out(text, width, 3, Console(width=width))
    lines = made.split("\n")
    assert len(lines) <= 3 and all(line.cell_len <= width for line in lines)


# -- summary, status, inspect -----------------------------------------------------------------------------------------


def test_the_summary_is_whole_at_80_columns() -> None:
    state = RunState()
    for fact in FactStream(steps=60).facts():
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)  # type: ignore[arg-type]
    text = shown(summary(state, Path("runs/demo"), Path("runs/demo/report.html")), 80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    bars = [line for line in text.splitlines() if "█" in line]
    assert len(bars) == 3 and all(re.search(r"\d %   KL \d", line) for line in bars[1:])
    assert re.search(r"Reward, drawn +\S+  0\.\d{3} → 0\.\d{3} ", text)
    for words in ("headrace export runs/demo --to DIR", "a new one goes on with its 17 requests", "versions delivered"):
        assert words in flat(text)


def test_status_is_whole_at_80_columns(state: RunState) -> None:
    told = LiveStatus(
        pid=4711, written=0.0, workers={"engine": 4712, "trainer": 4713}, picture="runs/demo/logs/stacks-1.txt"
    )
    text = shown(panel("runs/demo", Status("alive", "training", told), state), 80)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for words in (
        "controller 4711, engine 4712, trainer 4713",
        "running, 3 waiting, kv 41 %",
        f"clip {100 * state.rows[-1].report.clip_fraction:.0f} %",
        "lag max 1 of 1",
        "nothing lost",
        f"drawn {state.accounting.drawn}",
        "a new one goes on with its 17 requests",
        "stacks-1.txt",
    ):
        assert words in flat(text), words


def test_inspect_gives_the_text_the_width(tmp_path: Path) -> None:
    facts: list[Fact] = list(FactStream(steps=2, groups=2, size=3).facts())
    (tmp_path / "config.toml").write_text('[model]\npath = "no/where"\n[rollout]\ntemperature = 1.0\n')
    write_journal(tmp_path, records_of([_talkative(fact) for fact in facts]))
    for width, beside in ((80, False), (140, True)):
        console = Console(file=io.StringIO(), width=width)
        inspect(tmp_path, worst=0, console=console)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        texts = [line for line in lines if "The first of them" in line]
        assert len(texts) == 6 and max(map(len, lines)) <= width
        for line in texts:
            text = line[line.index("The first") :]
            assert len(text) >= 70 and LONG.startswith(text.rstrip("…"))
            assert bool(re.match(r" *\d+ +\d ", line)) == beside


def _talkative(fact: Fact) -> Fact:
    if not isinstance(fact, StepTrained):
        return fact
    tree = msgspec.to_builtins(fact)
    for group in tree["groups"]:
        for scored in group["scored"]:
            for turn in scored["episode"]["turns"]:
                turn["completion"]["text"] = LONG
    return msgspec.convert(tree, StepTrained)


def test_the_live_view_and_the_summary_begin_with_the_verdict(state: RunState) -> None:
    said = health(state)
    words = " ".join(said.sentence.split()[:6])
    drawn = Console(file=io.StringIO(), width=120)
    drawn.print(frame(state))
    drawn.print(summary(state, None, None))
    live, _, after = drawn.file.getvalue().partition("╭")  # type: ignore[attr-defined]
    assert live.lstrip().startswith("verdict") and words in live and live.count("held out") == 1
    assert words in after and after.index("Verdict") < after.index("Held-out reward")
    assert said.remedy and f"→ {said.remedy}" in after
