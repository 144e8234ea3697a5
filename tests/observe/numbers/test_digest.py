"""The sums of a long run from its digest, and its steps from their place in the metrics: the same as from all facts."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.core.errors import HeadraceError
from headrace.core.reports import PromptChoice, SleepReport
from headrace.core.types import Scored
from headrace.durable.atomic_files import read_lines
from headrace.facts import progress
from headrace.facts.facts import (
    Fact,
    FirstFailure,
    FleetSample,
    GpuUse,
    GroupEnded,
    IdentityChecked,
    MemberMoved,
    MemberSample,
    Planned,
    ProcessesUsed,
    ProcessUse,
    PromptChosen,
    ScorerAsked,
    Slept,
    StepTrained,
    TicketDrawn,
    Waited,
    WeightsLive,
    Woke,
    WorkerJoined,
)
from headrace.facts.group_numbers import Recent, Shares, Tally, Tickets
from headrace.facts.index_file import (
    DIGEST,
    DIGEST_MAGIC,
    INDEX,
    IndexReader,
    NumbersIndex,
    fields_of,
    framed_bytes,
    read_digest,
    thinned,
    write_digest,
)
from headrace.facts.number_tables import FARTHEST, GroupTable
from headrace.facts.recorder import Recorder
from headrace.facts.records import METRICS, Resume, read_metrics, summarise
from headrace.facts.run_state import RunState, stride_of
from headrace.facts.run_totals import as_counter
from headrace.run.result import RunResult
from headrace.views.board.board_parts import PARTS, part
from headrace.views.board.followed_run import OF_POOLS, FollowedRun, place_after, read_window
from headrace.views.screen.console import Console
from headrace.views.screen.live import brief, frame
from headrace.views.screen.summary import summary
from support.fact_stream import FactStream, standing

OTHERS: tuple[Fact, ...] = (
    TicketDrawn(0.1, 9000, "p"),
    PromptChosen(
        0.1, 9000, PromptChoice(pool="mixed", drawn=2, known=7, mean=0.5, offered=0.4, looked={"mixed": 3, "new": 1})
    ),
    PromptChosen(0.2, 9001, PromptChoice(pool="new", drawn=1, known=8, mean=math.nan, offered=0.4, looked={"new": 4})),
    GroupEnded(0.3, 9000, "p", "dropped", "overdue", lengths=(3, 4), rewards=(0.0, 1.0), talk={"turns": 4}),
    ScorerAsked(0.4, scorer="judge", what="judge", completions=4, seconds=1.5, tokens=9, failures={"timeout": 1}),
    FleetSample(0.5, (MemberSample(name="e1", state="serving", version=0, running=1, tokens=5, rate=2.0, absences=0),)),
    ProcessesUsed(0.55, {"engine": ProcessUse(1, 0.5, 1 << 30)}, (GpuUse(0, 0.25, 1 << 30),)),
    MemberMoved(0.6, "e1", "away", "no answer", 2, 30, 0),
    WorkerJoined(0.7, "engine 2", "host", 12, "10.0.0.1:5"),
    FirstFailure(0.8, "reward_raised", "KeyError", "'x'", "line 1", "p"),
    Slept(0.9, "engine", SleepReport(seconds=0.1, memory=5)),
    Woke(1.5, "engine", SleepReport(seconds=0.2)),
    Slept(1.6, "trainer", SleepReport(seconds=0.1, memory=7)),
    Woke(1.62, "lent engine", SleepReport(seconds=0.1)),
    Slept(1.65, "lent engine", SleepReport(seconds=0.1, tokens=9)),
    Waited(1.7, "engine", "the trainer", 0.5),
    Planned(1.8, 300, "time is short"),
)


def facts(steps: int, seed: int = 0) -> list[Fact]:
    first, *rest = FactStream(steps=steps, seed=seed).facts()
    return [first, *OTHERS, *rest]


def written(run_dir: Path, given: list[Fact], ends: bool = True) -> Recorder:
    recorder = Recorder(run_dir, index=NumbersIndex(run_dir, every=3000))
    for fact in given:
        recorder.record(fact)
    if ends:
        recorder.close()
    return recorder


def folded(given: list[Fact]) -> RunState:
    state = RunState()
    for fact in given:
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)  # type: ignore[arg-type]
    return state


def whole(run_dir: Path) -> FollowedRun:
    """Reads all facts, with neither index nor digest."""
    for name in (INDEX, DIGEST):
        (run_dir / name).rename(run_dir / f"{name}.away")
    run = FollowedRun(run_dir)
    run.catch_up(60)
    for name in (INDEX, DIGEST):
        (run_dir / f"{name}.away").rename(run_dir / name)
    assert run.state.whole and run.read_share == 1.0
    return run


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every run counts as long."""
    monkeypatch.setattr("headrace.views.board.followed_run.SHORT", 0)
    yield


def parts(run: FollowedRun) -> dict[str, str]:
    """The tabs that have no choice of steps."""
    names = PARTS.keys() - {"pools", "drawn"}
    return {name: part(name, run.run_dir, run.state, run.numbers) for name in names}


def test_a_state_is_the_same_when_it_comes_back_from_bytes():
    state = thinned(folded(facts(40)))
    once = msgspec.msgpack.encode(state)
    back = msgspec.msgpack.decode(once, type=RunState, dec_hook=as_counter)
    assert msgspec.msgpack.encode(thinned(back)) == once and back.accounting == state.accounting
    assert (
        back.choices.distance == state.choices.distance and back.scorers["judge"].words == state.scorers["judge"].words
    )


def test_equal_sets_are_equal_bytes():
    one, other = RunState(), RunState()
    one.tickets.flying, other.tickets.flying = {8, 0, 16}, {16, 8}
    other.tickets.flying.add(0)
    assert list(one.tickets.flying) != list(other.tickets.flying)
    assert msgspec.msgpack.encode(thinned(one)) == msgspec.msgpack.encode(thinned(other))


def test_a_digest_does_not_bring_back_the_directory_of_a_deleted_run(tmp_path: Path):
    """It is written right behind a step's line, at which a user or a script may delete the run; its checkpoints would follow into a new one."""
    write_digest(tmp_path / "deleted" / DIGEST, b"sums")
    assert not (tmp_path / "deleted").exists()


def test_names_of_numbers_are_part_of_a_digest():
    class Other(RunState):
        one_more: int = 0

    kinds = (Tickets, Recent, Tally, Shares, RunState, Other)
    assert len({fields_of(kind) for kind in kinds}) == len(kinds)


def test_a_long_run_is_known_from_its_digest_as_from_all_its_facts(tmp_path: Path, long: None):
    written(tmp_path, facts(300))
    opened = FollowedRun(tmp_path)
    assert opened.read_share == 1.0 and not opened.state.whole, "nothing was left to read"
    read = whole(tmp_path)
    assert parts(opened) == parts(read)
    assert opened.state.step == 300 and len(opened.state.rows) < 200 < len(read.state.rows)
    for name in ("lag", "tokens", "KL (k3)", "max"):  # the table by lag is of all steps
        cells = [re.findall(rf'data-head="{re.escape(name)}">(.*?)</td>', part("drawn", tmp_path, one.state, one.numbers)) for one in (opened, read)]  # fmt: skip
        assert cells[0] == cells[1] != []


def test_facts_behind_the_digest_are_read(tmp_path: Path, long: None):
    given = facts(60)
    half = next(place for place, fact in enumerate(given) if isinstance(fact, StepTrained) and fact.report.step == 41)
    recorder = written(tmp_path, given[:half], ends=False)
    assert read_digest(tmp_path / DIGEST, tmp_path), "it is written while the run goes on"
    opened = FollowedRun(tmp_path)
    assert 0 < opened.unread < 100_000 and not opened.state.whole
    for fact in given[half:]:
        recorder.record(fact)
    opened.catch_up(60)
    recorder.close()
    read = whole(tmp_path)
    assert parts(opened) == parts(read)
    for (name, column), (_, other) in zip(
        sorted(opened.numbers.columns.items()), sorted(read.numbers.columns.items()), strict=True
    ):
        assert column[0].tolist() == other[0].tolist() and column[1].tolist() == other[1].tolist(), name
    assert opened.numbers.groups.rows.view.tobytes() == read.numbers.groups.rows.view.tobytes()
    lines = (tmp_path / METRICS).read_bytes().count(b"\n")
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b"damaged\n")
    opened.catch_up(60)
    assert f"(line {lines + 1})" in opened.state.warnings[-1].message


def test_a_digest_of_other_metrics_is_not_used(tmp_path: Path, long: None):
    written(tmp_path, facts(60))
    digest, metrics = (tmp_path / DIGEST).read_bytes(), (tmp_path / METRICS).read_bytes()
    for data in (b"", digest[: len(digest) // 2], digest[:100] + b"####" + digest[104:], b"another " + digest[8:]):
        (tmp_path / DIGEST).write_bytes(data)
        assert read_digest(tmp_path / DIGEST, tmp_path) is None
        assert FollowedRun(tmp_path).state.whole
    (tmp_path / DIGEST).write_bytes(digest)
    assert read_digest(tmp_path / DIGEST, tmp_path)
    (tmp_path / METRICS).write_bytes(metrics[: len(metrics) // 2])
    assert FollowedRun(tmp_path).state.whole, "a resume cut the metrics"
    (tmp_path / METRICS).write_bytes(metrics.replace(b'"prompts":64', b'"prompts":65'))
    assert read_digest(tmp_path / DIGEST, tmp_path) is None


def test_a_resumed_run_has_the_digest_of_all_its_processes(tmp_path: Path, long: None):
    given = list(FactStream(steps=24).facts())
    half = next(place for place, fact in enumerate(given) if isinstance(fact, StepTrained) and fact.report.step == 13)
    written(tmp_path, given[: half + 20], ends=False)
    resumed = Recorder(tmp_path, resume=standing(given[:half], 13), index=NumbersIndex(tmp_path, every=3000))
    for fact in given[half:]:
        resumed.record(fact)
    resumed.close()
    opened = FollowedRun(tmp_path)
    assert opened.read_share == 1.0 and not opened.state.whole
    assert parts(opened) == parts(whole(tmp_path))


def test_kept_steps_are_a_part_of_those_kept_before():
    for steps in (255, 256, 257, 511, 512, 513, 100_000):
        stride = stride_of(steps)
        assert steps / stride <= 256 and (stride == 1 or 2 * steps / stride > 256)
    assert all(stride_of(steps + 1) % stride_of(steps) == 0 for steps in range(3000))


def test_a_window_has_the_facts_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.views.board.followed_run.NEAR", 2000)
    given = facts(60)
    written(tmp_path, given)
    state = whole(tmp_path).state
    for first, last in ((1, 60), (1, 1), (17, 31), (60, 60), (59, 90)):
        found = read_window(tmp_path, state.started, first, last)
        end = min(last, 60)
        assert [row.report.version for row in found.state.rows] == list(range(first, end + 1))
        assert (found.first, found.last, found.cut) == (first, end, False)
        assert {swap.update.version for swap in found.state.swaps} >= set(range(first, end))
        assert found.state.lengths.drawn.count > 0 or first == last
        pools = read_window(tmp_path, state.started, first, last, kinds=OF_POOLS)
        assert pools.state.rows == found.state.rows and not pools.state.lengths.drawn.count
    short = read_window(tmp_path, state.started, 10, 60, most=20_000)
    assert short.cut and 10 <= short.last < 60 and short.state.rows[-1].report.version == short.last
    with (tmp_path / METRICS).open("rb") as file:
        for step in range(61):
            file.seek(place_after(file, step))
            later = [int(one) for one in re.findall(rb'"fact":"StepTrained"[^{]*\{"step":(\d+)', file.read())]
            assert later == list(range(step, 60))


def test_the_pools_of_a_long_run_are_shown_for_some_steps(tmp_path: Path, long: None):
    written(tmp_path, facts(120))
    run = FollowedRun(tmp_path)

    def shown(name: str, asked: tuple[int, int] | None = None) -> tuple[list[int], str]:
        html = part(name, tmp_path, run.state, run.numbers, asked=asked)
        return [int(one) for one in re.findall(r'data-tip="step (\d+)\ntrained', html)], html

    steps, html = shown("pools")
    assert steps == list(range(81, 121)) and 'class="strip"' in html and "Who waited for whom" in html
    steps, html = shown("pools", (7, 12))
    assert steps == list(range(7, 13)) and 'data-steps="1-6"' in html and 'data-steps="13-18"' in html
    assert shown("pools", (500, 900))[0] == [120] and shown("pools", (-3, 1))[0] == [1]
    everything, some = shown("drawn")[1], shown("drawn", (7, 12))[1]
    tips = [list(dict.fromkeys(re.findall(r'data-tip="step (\d+)\nlag', html))) for html in (everything, some)]
    assert tips == [[str(one) for one in range(1, 121)], [str(one) for one in range(7, 13)]]


# -- a resume -----------------------------------------------------------------------------------------------------------


def killed(run_dir: Path, given: list[Fact], saved: int, end: int) -> Path:
    """Writes a run that is killed before fact `end`, with a checkpoint before fact `saved`. Returns its digest."""
    recorder = Recorder(run_dir, index=NumbersIndex(run_dir, every=3000))
    for fact in given[:saved]:
        recorder.record(fact)
    path = run_dir / "checkpoint.digest"
    path.write_bytes(recorder.digest())
    for fact in given[saved:end]:
        recorder.record(fact)
    return path


def resumed(run_dir: Path, resume: Resume, more: list[Fact]) -> RunState:
    recorder = Recorder(run_dir, resume=resume, waits=True, index=NumbersIndex(run_dir, every=3000))
    recorder.begin()
    for fact in more:
        recorder.record(fact)
    recorder.close()
    return recorder.state


def troubled(given: list[Fact]) -> list[Fact]:
    """The same facts with what is rare: swaps that hold generation back, tokens of mixed weights, probes that fail."""
    return [_troubled(fact) for fact in given]


def _troubled(fact: Fact) -> Fact:
    match fact:
        case WeightsLive():
            return msgspec.structs.replace(fact, pause=0.25, interrupted=3)
        case IdentityChecked():
            return msgspec.structs.replace(fact, ok=fact.version > 20, max_abs_diff=10.0 / fact.version)
        case StepTrained():
            first, *others = fact.groups
            scored = tuple(_mixed(rollout) for rollout in first.scored)
            return msgspec.structs.replace(fact, groups=(msgspec.structs.replace(first, scored=scored), *others))
    return fact


def _mixed(rollout: Scored) -> Scored:
    turns = tuple(
        msgspec.structs.replace(
            turn,
            completion=msgspec.structs.replace(
                turn.completion,
                spans=tuple(msgspec.structs.replace(span, mixed=True) for span in turn.completion.spans),
            ),
        )
        for turn in rollout.episode.turns
    )
    return msgspec.structs.replace(rollout, episode=msgspec.structs.replace(rollout.episode, turns=turns))


def same_sums(one: RunState, other: RunState) -> bool:
    known = [msgspec.msgpack.encode(thinned(state)) for state in (one, other)]
    return known[0] == known[1]


def numbers_of(run_dir: Path) -> list[object]:
    """What a reader of the index finds: every number by step, and every group."""
    reader = IndexReader(run_dir / INDEX, run_dir)
    reader.catch_up()
    found = reader.numbers
    series = [(name, steps.tolist(), values.tobytes()) for name, (steps, values) in sorted(found.columns.items())]
    return [found.size, series, found.groups.rows.view.tobytes(), found.groups.reasons]


def shown(state: RunState) -> str:
    console = Console(file=io.StringIO(), width=100, no_color=True)
    for one in (summary(state), brief(state), frame(state)):
        console.print(one)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_resume_from_the_checkpoints_sums_is_one_that_has_read_everything(tmp_path: Path, seed: int):
    """Whether the journal after the checkpoint counts or is set aside, and wherever the kill was."""
    rng, steps = random.Random(seed), (30, 60, 60, 40, 300)[seed % 5]
    stream = FactStream(steps=steps, seed=seed)
    given = troubled(list(stream.facts()))
    ends = [place for place, fact in enumerate(given) if isinstance(fact, StepTrained)]
    step = rng.randrange(steps // 2, steps - 5)
    saved, end = ends[step - 1] + rng.randrange(3), rng.randrange(ends[step + 1], ends[step + 4])
    rewinds = seed % 2 == 0
    done = sum(isinstance(fact, StepTrained) for fact in given[: saved if rewinds else end])
    first, second = tmp_path / "quick", tmp_path / "whole"
    for directory in (first, second):
        directory.mkdir()
        digest = killed(directory, given, saved, end)
    resume = standing(given[: saved if rewinds else end], done)
    quick = replace(resume, digest=first / digest.name)
    more = [stream.start(resumed_at=done), *given[saved if rewinds else end :]]
    one, other = resumed(first, quick, more), resumed(second, resume, more)
    assert not one.whole and other.whole and same_sums(one, other)
    assert shown(one) == shown(other) and "of mixed" in shown(one) and "rollouts interrupted" in shown(one)
    for name in (METRICS, f"{METRICS}.discarded"):
        assert list(read_lines(first / name)) == list(read_lines(second / name))
    assert numbers_of(first) == numbers_of(second)
    again = FollowedRun(first)
    again.catch_up(60)
    assert same_sums(again.state, one), "the file has what was counted"


def test_sums_that_do_not_fit_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # fmt: skip
    given = list(FactStream(steps=40).facts())[:-1]
    middle = next(place for place, fact in enumerate(given) if isinstance(fact, StepTrained) and fact.report.step == 20)
    path = killed(tmp_path, given, middle + 1, len(given))
    resume = replace(standing(given, 40), digest=path)
    good = {name: (tmp_path / name).read_bytes() for name in (path.name, METRICS, INDEX)}

    def opened() -> RunState:
        return Recorder(tmp_path, resume=resume, waits=True, index=NumbersIndex(tmp_path)).state

    path.unlink()
    assert opened().whole and not capsys.readouterr().err, "nothing is said of what takes no time"
    path.write_bytes(good[path.name])
    monkeypatch.setattr("headrace.facts.recorder.LONG", 0)
    assert not opened().whole and same_sums(opened(), folded(given)) and not capsys.readouterr().err
    metrics, index = good[METRICS], good[INDEX]
    place = read_digest(path, tmp_path)
    assert place
    first = metrics.index(b"\n") + 1
    block = place.block[0] + 30
    others = DIGEST_MAGIC + framed_bytes(
        msgspec.msgpack.encode(msgspec.structs.replace(place, fields=place.fields + 1))
    )
    changes = {
        path.name: (b"", others, good[path.name][:-7], good[path.name].replace(b"hrdigst2", b"hrdigst1")),
        METRICS: (
            metrics[first:],
            metrics[: place.size - 9] + b"1" + metrics[place.size - 8 :],
            metrics[: place.size - 20] + metrics[place.size :],
        ),
        INDEX: (b"", index[: place.block[1] - 1], index[:block] + b"####" + index[block + 4 :]),
    }
    for name, contents in changes.items():
        for data in contents:
            (tmp_path / name).write_bytes(data)
            state = opened()
            assert state.whole, name
            assert name == METRICS or same_sums(state, folded(given)), name
            assert f"reading all 0 MB of metrics.jsonl: {tmp_path.name} has no sums" in capsys.readouterr().err, name
        (tmp_path / name).write_bytes(good[name])
    assert not opened().whole


def test_sums_of_two_lives_go_on_from_each_other(tmp_path: Path):
    """A second resume from the same checkpoint, and one from the next, both without reading what is before."""
    stream = FactStream(steps=60)
    given = list(stream.facts())
    ends = [place + 1 for place, fact in enumerate(given) if isinstance(fact, StepTrained)]
    path = killed(tmp_path, given, ends[19], ends[24])
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b"damaged\n")
    lines = (tmp_path / METRICS).read_bytes().count(b"\n")
    resume = replace(standing(given[: ends[24]], 25), digest=path)
    assert Recorder(tmp_path, resume=resume, waits=True, index=NumbersIndex(tmp_path)).unreadable == [lines]
    for end in (ends[23], ends[22]):  # each sets a step aside, and is killed
        resume = replace(standing(given[:end], given[end - 1].report.version), digest=path)  # type: ignore[union-attr]
        recorder = Recorder(tmp_path, resume=resume, index=NumbersIndex(tmp_path, every=3000))
        assert not recorder.state.whole and recorder.state.step == given[end - 1].report.version  # type: ignore[union-attr]
        for fact in given[end : ends[24]]:
            recorder.record(fact)
    later = tmp_path / "later.digest"
    later.write_bytes(recorder.digest())
    found = read_digest(later, tmp_path)
    assert found and found.lines == (tmp_path / METRICS).read_bytes()[: found.size].count(b"\n")
    for fact in given[ends[24] : ends[40]]:
        recorder.record(fact)
    state = resumed(tmp_path, replace(standing(given[: ends[40]], 41), digest=later), given[ends[40] :])
    assert not state.whole and same_sums(state, folded(list(read_metrics(tmp_path))))
    reader = IndexReader(tmp_path / INDEX, tmp_path)
    reader.catch_up()
    assert reader.numbers.size == (tmp_path / METRICS).stat().st_size


def test_the_history_of_a_resumed_run_has_all_steps(tmp_path: Path):
    given = list(FactStream(steps=300).facts())
    ends = [place + 1 for place, fact in enumerate(given) if isinstance(fact, StepTrained)]
    path = killed(tmp_path, given, ends[289], ends[290])
    state = resumed(tmp_path, replace(standing(given[: ends[289]], 290), digest=path), given[ends[289] :])
    assert not state.whole and len(state.rows) < 300
    result = RunResult(directory=tmp_path, reason="finished", step=300, before=None, after=None, report=tmp_path / "report.html", state=state)  # fmt: skip
    assert result.history == progress.history(folded(given).rows)
    (tmp_path / METRICS).unlink()
    with pytest.raises(HeadraceError, match=r"metrics\.jsonl is gone, and with it the steps before the resume"):
        _ = result.history


def test_groups_go_on_behind_those_that_were_not_read():
    table, ended = GroupTable(), GroupEnded(1.0, 2 * FARTHEST, "p", "ready", rewards=(1.0,), lengths=(3,))
    table.begin_at(2 * FARTHEST - 3, ["", "overdue"], [])
    table.end(ended)
    table.train([5, ended.ticket], 9)
    assert len(table.rows) == ended.ticket + 1 and table.rows.view["step"][[5, ended.ticket]].tolist() == [9, 9]


def test_a_reader_notices_that_an_index_lost_its_last_blocks(tmp_path: Path):
    stream = FactStream(steps=60)
    given = list(stream.facts())
    ends = [place + 1 for place, fact in enumerate(given) if isinstance(fact, StepTrained)]
    path = killed(tmp_path, given, ends[19], ends[50])
    reader = IndexReader(tmp_path / INDEX, tmp_path)
    reader.catch_up()
    assert len(reader.numbers.columns.series("reward/drawn")[0]) > 45
    other = [msgspec.structs.replace(one, reward_drawn=0.5) if isinstance(one, StepTrained) else one for one in given]
    resumed(tmp_path, replace(standing(given[: ends[19]], 20), digest=path), other[ends[19] :])
    reader.catch_up()
    assert reader.numbers.columns.series("reward/drawn")[1][20:].tolist() == [0.5] * 40
