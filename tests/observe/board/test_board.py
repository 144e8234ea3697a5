"""The board: its numbers against literal ones, its answers over HTTP, and runs that are torn, cut, absent or being written."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from headrace import cli
from headrace.commands.serving.serving_commands import beside
from headrace.core.batches import Group
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.durable.journal import KINDS, JournalReader, ReadyRecord, read_journal, read_only
from headrace.facts.facts import GroupEnded, Planned, StepTrained
from headrace.facts.health import Standing, health
from headrace.facts.index_file import DIGEST, INDEX, IndexReader, NumbersIndex
from headrace.facts.number_tables import MINUTES, GroupTable, Numbers, StepColumns, Wanted, merged, trailing_mean
from headrace.facts.recorder import Recorder
from headrace.facts.records import METRICS
from headrace.facts.run_state import RunState
from headrace.views.board.board_parts import PARTS
from headrace.views.board.board_routes import FILES, _changes, make_board_app
from headrace.views.board.browsing import Browser, RolloutQuery
from headrace.views.board.followed_run import BEHIND, FollowedRun, ListedRun, RunList
from headrace.views.board.runs_board import RunsBoard
from headrace.views.report.side_by_side import settings_apart
from headrace.web.server import bind
from support.fact_stream import FactStream, standing, write_journal, write_run
from support.few import few
from support.journal_frames import places_of, spoil

TOKEN = "a-token-of-the-tests-only"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first", config="[train]\nlr = 1e-5\n[algo]\nname = 'grpo'\n")
    write_run(root / "second", seed=1, end=False, config="[train]\nlr = 3e-5\n[algo]\nname = 'grpo'\n")
    return root


def board_of(directory: Path, alive: bool = False) -> RunsBoard:
    return RunsBoard(directory, held=lambda path: alive, make_pieces=lambda path: None)


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[TestClient]:
    yield TestClient(make_board_app(board_of(runs)), base_url="http://127.0.0.1", raise_server_exceptions=False)


def rollouts(client: TestClient, **given: object) -> dict[str, object]:
    answer = client.get("/api/rollouts", params={"run": "first", **given})
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def cells(html: object, column: str) -> list[str]:
    return [re.sub(r"<small.*", "", one) for one in re.findall(rf'data-head="{column}">(.*?)</td>', str(html))]


def tickets(html: object) -> list[str]:
    return re.findall(r"ticket (\d+)<", str(html))


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_smoothing_is_the_mean_of_a_value_and_those_before_it():
    assert trailing_mean(np.array([4.0, 2.0, 6.0, 0.0]), 3).tolist() == [4.0, 3.0, 4.0, 8 / 3]


def test_merged_points_have_the_mean_and_the_range_of_their_steps():
    curve = merged(np.arange(5.0), np.array([1.0, 3.0, 2.0, 8.0, 5.0]), points=3)
    assert (curve.x.tolist(), curve.y.tolist()) == ([0.5, 2.5, 4.0], [2.0, 5.0, 5.0])
    assert (curve.low.tolist(), curve.high.tolist(), curve.merged) == ([1.0, 2.0, 5.0], [3.0, 8.0, 5.0], 2)


def test_a_number_is_drawn_over_another_where_both_are_known_and_a_step_done_again_counts_once():
    columns = StepColumns()
    for step, x, y in ((1, 5.0, 10.0), (2, 3.0, 20.0), (3, 4.0, 99.0), (3, 4.0, 30.0)):
        columns.add(step, {"x": x, "y": y})
    columns.add(4, {"y": 40.0})
    curve = columns.drawn("y", "x")
    assert (curve.x.tolist(), curve.y.tolist()) == ([3.0, 4.0, 5.0], [20.0, 30.0, 10.0])
    inside = columns.drawn("y", "step", within=(2, 3))
    assert (inside.x.tolist(), inside.y.tolist()) == ([2.0, 3.0], [20.0, 30.0])
    for step, value in ((0, 0.1), (3, 0.9)):
        columns.add(step, {"held_out/reward": value})
    assert columns.drawn("held_out/reward", "step", window=5).y.tolist() == [0.1, 0.9], "a measurement is not smoothed"
    columns.add(1, {MINUTES: 0.5})
    columns.add(3, {MINUTES: 1.5})
    assert columns.drawn("held_out/reward", MINUTES).x.tolist() == [0.0, 1.5], "step 0 is before the first step"
    assert columns.drawn("absent", "step").x.tolist() == columns.drawn("y", "absent").x.tolist() == []


def test_groups_are_found_by_their_numbers_in_the_order_that_was_asked_for():
    table = GroupTable()
    for ticket, rewards, cut in ((0, (0.0, 1.0), 0), (1, (0.2, 0.4), 2), (2, (0.9, 0.8), 0), (4, (), 0)):
        lengths = tuple(10 * ticket + i for i in range(len(rewards)))
        table.end(GroupEnded(0.0, ticket, "p", "ready", rewards=rewards, lengths=lengths, truncated=cut))
    table.end(GroupEnded(0.0, 3, "p", "dropped", "no_contrast", rewards=(1.0, 1.0)))
    table.end(GroupEnded(0.0, 1 << 40, "p", "ready"))  # damage: no memory for all between
    table.train([0, 1], step=1)
    table.train([2], step=2)
    assert table.find(Wanted()).tolist() == [2, 1, 0, 4]
    assert table.find(Wanted(rewards=(0.5, 2.0)), "oldest").tolist() == [0, 2]
    assert table.find(Wanted(rewards=(0.0, 0.3)), "best").tolist() == [0, 1]
    assert table.find(Wanted(steps=(1, 1)), "longest").tolist() == [1, 0]
    assert table.find(Wanted(cut=True)).tolist() == [1]
    assert table.find(Wanted(gone=True)).tolist() == [3]
    assert table.reasons[table.rows.view["reason"][3]] == "no_contrast"


# -- reading while it is written ------------------------------------------------------------------------------------------


def test_a_run_that_is_read_as_it_grows_gives_what_a_whole_reading_gives(runs: Path, tmp_path: Path):
    data = (runs / "first" / METRICS).read_bytes()
    growing = FollowedRun(tmp_path)
    for end in (0, len(data) // 3, len(data) // 2 + 7, len(data)):  # most of these tear a line
        (tmp_path / METRICS).write_bytes(data[:end]) if not end else _append(tmp_path / METRICS, data, end)
        growing.catch_up(60)
    whole = FollowedRun(runs / "first")
    whole.catch_up(60)
    assert growing.state.step == whole.state.step == 30 and growing.read_share == 1.0
    for (name, column), (other_name, other) in zip(
        growing.numbers.columns.items(), whole.numbers.columns.items(), strict=True
    ):
        assert name == other_name and all(np.array_equal(a, b) for a, b in zip(column, other, strict=True))
    assert np.array_equal(growing.numbers.groups.rows.view, whole.numbers.groups.rows.view)


def _append(path: Path, data: bytes, end: int) -> None:
    with path.open("ab") as file:
        file.write(data[path.stat().st_size : end])


def test_a_run_that_was_cut_by_a_resume_is_read_anew(runs: Path, tmp_path: Path):
    data = (runs / "first" / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(data)
    run = FollowedRun(tmp_path)
    run.catch_up(60)
    lines = data.splitlines(keepends=True)
    steps = [place for place, line in enumerate(lines) if b'"StepTrained"' in line]
    (tmp_path / METRICS).write_bytes(b"".join(lines[: steps[10]]))
    run.catch_up(60)
    assert run.state.step == 10 and run.numbers.columns.last("reward/drawn") == run.state.rows[-1].reward_drawn


def equal_numbers(numbers: Numbers, other: Numbers) -> bool:
    """Whether both have the same numbers, and there are some."""
    pairs = zip(sorted(numbers.columns.items()), sorted(other.columns.items()), strict=True)
    same = [
        a == b and all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))
        for (a, left), (b, right) in pairs
    ]
    rows = numbers.groups.rows.view.tobytes() == other.groups.rows.view.tobytes()  # a NaN is not equal to itself
    return len(same) > 20 and all(same) and rows and numbers.groups.reasons == other.groups.reasons


def read_whole(run_dir: Path) -> Numbers:
    run = FollowedRun(run_dir)
    run.catch_up(60)
    assert run.read_share == 1.0 and run.numbers.size == (run_dir / METRICS).stat().st_size
    return run.numbers


def test_a_run_writes_an_index_from_which_its_numbers_are_known_before_its_facts_are_read(tmp_path: Path):
    recorder = Recorder(tmp_path, index=NumbersIndex(tmp_path, every=3000))
    for fact in FactStream(steps=30).facts():
        recorder.record(fact)
    reader = IndexReader(tmp_path / INDEX, tmp_path)
    reader.catch_up()
    assert reader.numbers.columns.series("reward/drawn")[0][-1] > 20, "blocks are written while the run goes on"
    recorder.close()
    opened = FollowedRun(tmp_path)
    assert opened.read_share == 0.0 and opened.numbers.size == (tmp_path / METRICS).stat().st_size
    reader.catch_up()
    assert equal_numbers(opened.numbers, read_whole(tmp_path)) and equal_numbers(reader.numbers, opened.numbers)


def test_an_index_counts_only_as_far_as_the_metrics_are_those_that_it_saw(tmp_path: Path):
    recorder = Recorder(tmp_path, index=NumbersIndex(tmp_path, every=3000))
    for fact in FactStream(steps=30).facts():
        recorder.record(fact)
    recorder.close()
    index, metrics = (tmp_path / INDEX).read_bytes(), (tmp_path / METRICS).read_bytes()
    for share in (0.0, 0.3, 0.7, 0.99):  # torn by a kill; damaged
        cut = int(share * len(index))
        for data in (index[:cut], index[:cut] + b"####" + index[cut + 4 :]):
            (tmp_path / INDEX).write_bytes(data)
            found = FollowedRun(tmp_path).numbers
            assert found.size < len(metrics) and (found.size > 0) == (share > 0.2)
            whole = read_whole(tmp_path)
            for name, (steps, _) in found.columns.items():
                assert np.array_equal(steps, whole.columns.series(name)[0][: len(steps)])
    (tmp_path / INDEX).write_bytes(index)
    lines = metrics.splitlines(keepends=True)
    (tmp_path / METRICS).write_bytes(b"".join(lines[: len(lines) // 2]))  # a loss of power took the end
    found = FollowedRun(tmp_path).numbers
    assert 0 < found.size <= (tmp_path / METRICS).stat().st_size
    (tmp_path / METRICS).write_bytes(metrics.replace(b'"step":7', b'"step":8'))  # another run
    assert FollowedRun(tmp_path).numbers.columns.last("reward/drawn") != read_whole(tmp_path).columns.last(
        "reward/drawn"
    )


def test_a_resumed_run_begins_its_index_anew(tmp_path: Path):
    facts = list(FactStream(steps=12).facts())
    half = next(place for place, fact in enumerate(facts) if isinstance(fact, StepTrained) and fact.report.step == 7)
    first = Recorder(tmp_path, index=NumbersIndex(tmp_path, every=2000))
    for fact in facts[: half + 30]:  # killed: nothing is closed, and what the journal lacks will be cut
        first.record(fact)
    before = (tmp_path / INDEX).read_bytes()
    Recorder(tmp_path, resume=standing(facts[:half], 7), waits=True, index=NumbersIndex(tmp_path)).close()
    assert (tmp_path / INDEX).read_bytes() == before, "a resume that was refused changes nothing"
    resumed = Recorder(tmp_path, resume=standing(facts[:half], 7), index=NumbersIndex(tmp_path, every=2000))
    for fact in facts[half:]:
        resumed.record(fact)
    resumed.close()
    assert equal_numbers(FollowedRun(tmp_path).numbers, read_whole(tmp_path))


def test_a_run_without_an_index_gets_one_in_the_cache(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, cache = tmp_path / "run", tmp_path / "cache"
    shutil.copytree(runs / "first", path)
    (path / INDEX).unlink()
    assert FollowedRun(path, cache).numbers.size == 0
    monkeypatch.setattr("headrace.views.board.followed_run.WORTH_SAVING", 1000)
    FollowedRun(path, cache).catch_up(60)
    again = FollowedRun(path, cache)
    assert again.read_share == 0.0 and equal_numbers(again.numbers, read_whole(path))
    monkeypatch.setattr("headrace.views.board.followed_run.SHORT", 0)
    (path / DIGEST).unlink()
    with_sums = FollowedRun(path, cache)
    assert (
        with_sums.read_share == 1.0
        and with_sums.state.step == 30
        and equal_numbers(with_sums.numbers, read_whole(path))
    )
    (next(cache.glob("*.index"))).write_bytes(b"torn")
    assert FollowedRun(path, cache).numbers.size == 0


def test_the_newest_groups_of_a_long_journal_are_found_before_it_has_been_read(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "first", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "journal")
    write_journal(tmp_path / "run", read_journal(runs / "first"), segment=10_000)
    ready = [one.group.ticket for one in read_only(runs / "first", ReadyRecord)]
    reader = JournalReader(tmp_path / "run", patient=False)
    while not reader.group(ready[-1]):
        assert reader.refresh(1e-9), "it stops after a segment"
    assert not reader.group(ready[0])
    while reader.refresh(1e-9):
        pass
    assert all(reader.group(ticket) for ticket in ready)


def test_the_list_says_how_each_run_ended(runs: Path, tmp_path: Path):
    first, second = sorted(RunList(runs, lambda path: False).lines(), key=lambda one: one.name)
    assert (first.name, first.life, first.step, first.steps) == ("first", "finished", 30, 30)
    assert (second.name, second.life) == ("second", "died") and "killed" in second.words
    assert first.held_out is not None and first.reward is not None
    assert (first.verdict, second.verdict) == ("learning", "broken")
    assert RunList(tmp_path, lambda path: False).lines() == []
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / METRICS).write_bytes(b'{"fact":"RunSta')
    assert [(line.name, line.life, line.steps) for line in RunList(tmp_path, lambda path: True).lines()] == [
        ("torn", "starting", 0)
    ]


def test_the_overview_knows_whether_a_run_goes_on(runs: Path) -> None:
    assert "died while" in board_of(runs).part("second", "overview")
    for shown in (board_of(runs, alive=True).part("second", "overview"), board_of(runs).part("first", "overview")):
        assert "or was killed" not in shown and "the run died" not in shown


@pytest.mark.parametrize(
    "path",
    few([*(f"part?part={part}" for part in PARTS), "lanes?", "rollouts?", "differences?", "csv?metric=train/loss", "curves?metric=train/loss", "metrics?"], keep=4),
)  # fmt: skip
def test_a_run_that_was_deleted_is_not_shown_and_its_name_may_be_given_again(path: str, tmp_path: Path):
    for number, name in enumerate(("one", "other")):
        write_run(tmp_path / name, seed=number, config=f"[train]\nlr = {number + 1}e-5\n")
    client = TestClient(make_board_app(board_of(tmp_path)), base_url="http://127.0.0.1", raise_server_exceptions=False)
    asked, other = f"/api/{path}&run=one", f"/api/{path}&run=other"
    assert client.get(asked).status_code == 200
    shutil.rmtree(tmp_path / "one")
    gone = client.get(asked)
    assert (gone.status_code, "there is no run one here" in gone.text) == (404, True)
    (tmp_path / "other").rename(tmp_path / "one")
    assert client.get(asked).status_code == 200 and client.get(other).status_code == 404


def test_the_list_knows_how_many_steps_were_planned_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.views.board.followed_run.TAIL", 20_000)
    first, *rest = FactStream(steps=30).facts()
    (tmp_path / "run").mkdir()
    recorder = Recorder(tmp_path / "run")
    for fact in (first, Planned(0.5, 44, "a step takes less time"), *rest):
        recorder.record(fact)
    recorder.close()
    assert [(line.step, line.steps) for line in RunList(tmp_path, lambda path: False).lines()] == [(30, 44)]


def test_the_list_knows_a_long_run_by_the_ends_of_its_file(runs: Path, tmp_path: Path):
    data = (runs / "first" / METRICS).read_bytes().splitlines(keepends=True)
    path = tmp_path / "long"
    path.mkdir()
    filler = b'{"fact":"Waited","t":3.0,"owner":"a","what":"b","seconds":1.0}\n' * 40_000
    (path / METRICS).write_bytes(b"".join(data[:40]) + filler + b"".join(data[40:]))
    (line,) = RunList(tmp_path, lambda path: False).lines()
    assert (line.life, line.step, line.steps, line.verdict) == ("finished", 30, 30, None)


def test_a_verdict_is_found_once_for_what_has_not_changed(runs: Path) -> None:
    listed, standing = ListedRun(runs / "first"), Standing("finished", "good")
    assert listed.catch_up() and listed.verdict(standing) == "learning"
    listed.state = RunState()
    assert listed.catch_up() and listed.verdict(standing) == "learning"
    assert listed.verdict(Standing("died", "bad")) == "broken", "another state of its process is another verdict"


@pytest.mark.parametrize("behind", [BEHIND, 20_000], ids=["read whole", "read from its digest on"])
def test_the_list_knows_the_verdict_of_a_run_while_it_grows(
    behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.views.board.followed_run.BEHIND", behind)
    facts = list(FactStream(steps=60).facts())
    (tmp_path / "run").mkdir()
    recorder = Recorder(tmp_path / "run", index=NumbersIndex(tmp_path / "run", every=20_000))
    listed, seldom = RunList(tmp_path, lambda path: False), RunList(tmp_path, lambda path: False)
    seen = set()
    for number, fact in enumerate(facts):
        recorder.record(fact)
        if number % 40 == 0 or fact is facts[-1]:
            (line,) = listed.lines()
            seldom.lines() if number == 40 else None
            assert (line.step, line.steps) == (recorder.state.step, recorder.state.started.steps)
            if line.verdict:
                standing = Standing(line.words, line.mark)
                assert line.verdict == health(recorder.state, standing=standing).kind
                seen.add(line.verdict)
    recorder.close()
    for one in (RunList(tmp_path, lambda path: False), seldom):
        (line,) = one.lines()
        assert (line.life, line.step, line.verdict) == ("finished", 60, "learning")
    assert behind < BEHIND or seen == {"broken", "learning"}, "an unfinished run that nobody holds has died"


def test_changes_are_sent_when_files_change(tmp_path: Path):
    async def go() -> None:
        board = board_of(tmp_path)
        changes = _changes(board, ["late"])
        assert (await anext(changes))["runs"] == []
        write_run(tmp_path / "late", end=False)
        answer = await anext(changes)
        assert [one["name"] for one in answer["runs"]] == ["late"] and answer["opened"]["late"]["read"] == 1.0
        board.closed = True
        assert [change async for change in changes] == []

    asyncio.run(go())


# -- over HTTP ------------------------------------------------------------------------------------------------------------


def test_the_page_needs_no_file_from_elsewhere(client: TestClient):
    page = client.get("/")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert all(one.startswith(("/static/", "data:")) for one in named)
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in FILES:
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200 and answer.content
        assert "//cdn" not in answer.text and "https://" not in answer.text.replace(
            "https://github.com/leeoniya/uPlot", ""
        )
    assert all(one.removeprefix("/static/") in FILES for one in named if one.startswith("/static/"))
    imported = set(re.findall(r'from "/static/([^"]+)"', client.get("/static/board.js").text))
    assert imported and imported <= set(FILES)


def test_curves_and_table_have_the_numbers_of_the_run(client: TestClient, runs: Path):
    rewards = [
        json.loads(line)["reward_drawn"]
        for line in (runs / "first" / METRICS).open()
        if '"fact":"StepTrained"' in line[:30]
    ]
    asked = {"run": ["first", "second"], "metric": "reward/drawn", "points": 100}
    answer = client.get("/api/curves", params=asked).json()
    assert answer["curves"]["reward/drawn"]["first"] == {"x": [float(one) for one in range(1, 31)], "y": rewards}
    assert set(answer["curves"]["reward/drawn"]) == {"first", "second"}
    few = client.get("/api/curves", params=asked | {"points": 10, "from": 4, "to": 23}).json()["curves"][
        "reward/drawn"
    ]["first"]
    assert few["x"] == [4.5 + 2 * place for place in range(10)]
    assert few["high"][0] == max(rewards[3:5]) and few["low"][0] == min(rewards[3:5])
    table = client.get("/api/csv", params={"run": "first", "metric": "reward/drawn"}).text.splitlines()
    assert table[0] == "run,step,minutes,tokens,reward/drawn" and len(table) == 31
    assert [float(line.split(",")[-1]) for line in table[1:]] == rewards
    assert client.get("/api/metrics", params={"run": "first"}).json()["reward/drawn"] == {"first": rewards[-1]}
    refused = client.get("/api/csv", params={"run": "first", "metric": "reward/draw"})
    assert refused.status_code == 404 and "no run has a number reward/draw; close are reward/drawn" in refused.text


def test_a_table_is_whole_though_little_of_a_long_run_has_been_read(tmp_path: Path) -> None:
    """Pages read a run for 0.7 s at a time, and say how much of it they know."""
    write_run(tmp_path / "long")
    for kept in (INDEX, DIGEST):  # as of a run that an earlier version made
        (tmp_path / "long" / kept).unlink()
    shares = []

    class Slow(FollowedRun):
        def catch_up(self, seconds: float) -> bool:
            more = self.read(5000)
            self._own.size = self._offset
            self._read_indexes()
            shares.append(self.read_share)
            return more

    board = board_of(tmp_path)
    board._opened["long"] = Slow(tmp_path / "long")
    assert len(list(board.csv(["long"], ["reward/drawn"]))) == 31
    assert shares[0] < 0.5 and shares[-1] == 1


def test_names_and_measured_speeds_are_no_settings_that_differ(tmp_path: Path):
    for name, steps in (("a", 3), ("b", 4)):
        write_run(
            tmp_path / name, config=f"name = '{name}'\n[train]\nsteps = {steps}\n[chosen.speeds]\nstep = {steps}.25\n"
        )
    assert list(settings_apart({name: tmp_path / name for name in "ab"})) == ["train.steps"]


def test_only_settings_that_differ_are_compared(client: TestClient):
    html = client.get("/api/differences", params={"run": ["first", "second"]}).text
    assert cells(html, "setting") == ["seed", "train.lr"] and cells(html, "second") == ["1", "3e-05"]


def test_parts_are_those_of_the_report(client: TestClient, runs: Path):
    from headrace.views.report.data import load
    from headrace.views.report.page import accounting, pools

    data = load(runs / "first")
    assert client.get("/api/part", params={"run": "first", "part": "accounting"}).text == accounting(data)
    assert client.get("/api/part", params={"run": "first", "part": "pools"}).text == pools(data)
    for part, words in (
        ("overview", "Policy identity"),
        ("drawn", "Lag of the trained tokens"),
        ("warnings", "killed by signal 9"),
        ("setup", "lr = 1e-5"),
    ):
        assert words in client.get("/api/part", params={"run": "first", "part": part}).text


def test_rollouts_are_filtered_by_numbers_and_words_and_paged(client: TestClient):
    everything = rollouts(client)
    assert everything["candidates"] == 120 and everything["shown"] == 12 and everything["following"] == 3
    wrong = rollouts(client, most=0.5)
    assert set(cells(wrong["html"], "reward")) == {"0"}
    old = rollouts(client, lag=1)
    assert set(cells(old["html"], "lag")) == {"1"}
    early = rollouts(client, to=2, order="oldest")
    assert {step.partition("<")[0] for step in cells(early["html"], "step")} <= {"1", "2"} and early["candidates"] == 8
    cut = rollouts(client, cut=1)
    assert "length" in str(cut["html"]) and "<small>stop</small>" not in str(cut["html"])
    one = rollouts(client, ticket=119)
    assert one["candidates"] == 1 and set(tickets(one["html"])) == {"119"}
    found = rollouts(client, words="THE ANSWER is <b>")
    assert "The answer is &lt;b&gt;" in str(found["html"]) and "<b>" not in str(found["html"])
    failed = rollouts(client, failed=1)
    assert "ZeroDivisionError: division by zero" in str(failed["html"])
    gone = rollouts(client, gone=1)
    assert set(cells(gone["html"], "outcome")) == {"dropped", "failed"}
    nothing = rollouts(client, words="no such words")
    assert nothing["shown"] == 0 and "No rollout fulfils" in str(nothing["html"])


def test_pages_of_rollouts_have_every_rollout_once(client: TestClient):
    seen, start = [], 0
    while start is not None:
        answer = rollouts(client, start=start, least=0.5)
        seen += list(zip(cells(answer["html"], "step"), tickets(answer["html"]), strict=True))
        start = answer["following"]  # type: ignore[assignment]
    table = FollowedRun(Path(str(client.app.state.board.directory)) / "first")  # type: ignore[attr-defined]
    table.catch_up(60)
    assert len({ticket for _, ticket in seen}) == len(table.numbers.groups.find(Wanted(rewards=(0.5, np.inf))))


def test_tokens_have_the_numbers_that_the_trainer_recorded(runs: Path):
    board = RunsBoard(
        runs, held=lambda path: False, make_pieces=lambda path: lambda tokens: [f"<{token}>" for token in tokens]
    )
    client = TestClient(make_board_app(board), base_url="http://127.0.0.1")
    first, second = (str(rollouts(client, ticket=ticket)["html"]) for ticket in _tickets_of_step(runs / "first", 7)[:2])
    assert re.findall(r'data-e="([\d.]+)"', first)[:3] == ["0.0000", "0.1000", "0.2000"]
    sampled, trained = re.findall(r'data-p="(\S+)" data-a="\S+" data-t="(\S+)"', first)[2]
    assert float(sampled) - float(trained) == pytest.approx(0.02, abs=2e-4)
    assert ' data-t="' not in second and 'value="entropy" disabled' in second
    assert "not recorded: a step records those of some of its rollouts" in second and "not recorded" not in first


def _tickets_of_step(run_dir: Path, step: int) -> list[int]:
    """The tickets that a step, counted from 1, trained; the trainer's numbers are those of the first."""
    rows = [json.loads(line) for line in (run_dir / METRICS).open() if '"fact":"StepTrained"' in line[:30]]
    found: list[int] = rows[step - 1]["tickets"]
    return found


def test_damaged_lines_of_a_journal_cost_only_their_groups(client: TestClient, runs: Path, tmp_path: Path):
    shutil.copytree(runs / "first", tmp_path / "first")
    damaged, whole, *_ = dict.fromkeys(tickets(rollouts(client)["html"]))
    found = [
        (path, one)
        for path, one in places_of(tmp_path / "first")
        if one.kind in KINDS[ReadyRecord] and one.key == int(damaged)
    ]
    spoil(tmp_path / "first", found[0][1].number)
    with found[-1][0].open("ab") as file:
        file.write(b"torn")
    other = TestClient(make_board_app(board_of(tmp_path)), base_url="http://localhost")
    assert "1 group cannot be found in the journal" in str(rollouts(other, ticket=damaged)["html"])
    assert rollouts(other, ticket=whole)["shown"]
    shutil.rmtree(tmp_path / "first" / "journal")
    assert "cannot be found" in str(
        rollouts(TestClient(make_board_app(board_of(tmp_path)), base_url="http://localhost"))["html"]
    )


def test_two_rollouts_stand_beside_each_other_with_what_differs_marked(client: TestClient, runs: Path):
    places = re.findall(r'data-place="([\d.]+)"', str(rollouts(client)["html"]))
    one, other = places[0], next(place for place in places if place.partition(".")[0] != places[0].partition(".")[0])
    answer = client.get("/api/compared", params={"run": "first", "one": one, "other": other})
    assert answer.status_code == 200 and answer.text.count('class="look"') == 2
    journal = JournalReader(runs / "first", patient=False)
    journal.refresh(60.0)
    for place in (one, other):
        ticket, rollout = map(int, place.split("."))
        group = journal.group(ticket)
        assert group and f"ticket {ticket}, rollout {rollout} · " in answer.text
        text = group.scored[rollout].episode.last.text
        assert escape(text) in re.sub("</?(del|ins)>", "", answer.text)
    same = client.get("/api/compared", params={"run": "first", "one": one, "other": one}).text
    assert "<del>" not in same and "<ins>" not in same and "They say the same." in same


def test_what_is_out_of_a_loss_follows_the_settings_that_a_resume_has_changed(tmp_path: Path):
    run = write_run(tmp_path / "runs" / "x")
    board = RunsBoard(tmp_path / "runs", held=lambda path: False, make_pieces=lambda path: None)
    before = board.rollouts("x", RolloutQuery()).html
    with (run / "config.toml").open("a") as file:
        file.write('[staleness]\noverdue = "trim"\nmax_lag = 0\n')
    after = board.rollouts("x", RolloutQuery()).html
    assert "overdue" in after and "overdue" not in before


def test_rollouts_of_many_lines_are_compared_where_they_first_differ(tmp_path: Path):
    thought = "a line of a thought\n" * 400
    scored = [
        Scored(Episode((Turn((1,), Completion((2,), (-0.5,), (VersionSpan(0, 0, 0),), "stop", text=text)),)), 1.0, {})
        for text in (f"{thought}so\n12", f"{thought}so\n13")
    ]
    write_journal(tmp_path, [ReadyRecord(1.0, Group(7, Prompt("p", "6 + 6?\nThink.", (1,)), tuple(scored), ()))])
    (tmp_path / "config.toml").write_text("")
    shown = Browser(tmp_path, lambda directory: None).compare(((7, 0), (7, 1)))
    assert "a line of a thought\nso\n<del>12</del>" in shown and "so\n<ins>13</ins>" in shown
    assert "characters before) … " in shown and "6 + 6?\nThink." in shown


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/part?run=../first&part=setup", 404, "there is no run ../first"),
        ("/api/part?run=/etc&part=setup", 404, "there is no run etc here"),
        ("/api/part?run=first&part=passwords", 404, "part must be one of overview"),
        ("/api/part?part=setup", 400, "give 1 to 1 of run"),
        ("/static/../board_routes.py", 404, ""),
        ("/static/..%2fboard_routes.py", 404, ""),
        ("/static/index.htm", 404, "no such file"),
        ("/api/curves?run=first", 400, "give 1 to 64 of metric"),
        ("/api/curves?run=first&metric=a&from=x", 400, "from is not a number: x"),
        ("/api/curves?run=first&metric=a&to=nan", 400, "to is not a number"),
        ("/api/curves?run=first&metric=a&points=1", 400, "points must be 2 to"),
        ("/api/rollouts?run=first&order=random", 400, "order must be one of newest"),
        ("/api/rollouts?run=first&lag=1e999", 400, "lag is not a number"),
        ("/api/compared?run=first&one=1.0&other=1", 400, "other must be the ticket of a rollout and its place"),
        ("/api/compared?run=first&one=1.0&other=999999.0", 404, "no rollout 0 of ticket 999999"),
        ("/api/compared?run=first&one=1.99&other=1.0", 404, "no rollout 99 of ticket 1"),
        ("/api/lanes?run=first&show=some", 400, "show must be one of all, trained"),
        ("/api/lanes?run=../first", 404, "there is no run ../first"),
        ("/api/nothing", 404, ""),
    ],
)
def test_bad_questions_are_refused_with_a_sentence(client: TestClient, path: str, status: int, words: str):
    answer = client.get(path)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_without_a_token_only_this_machine_is_answered(runs: Path):
    app = make_board_app(board_of(runs))
    assert TestClient(app, base_url="http://localhost:8420").get("/").status_code == 200
    assert TestClient(app, base_url="http://elsewhere.example").get("/").status_code == 403


def test_a_token_is_given_once_in_the_address_and_kept_in_a_cookie_that_does_not_hold_it(runs: Path):
    app = make_board_app(board_of(runs), TOKEN)
    client = TestClient(app, base_url="http://elsewhere.example")
    assert client.get("/api/metrics?run=first").status_code == 401
    assert client.get("/static/board.js").status_code == 401
    asked = client.get("/")
    assert asked.status_code == 401 and "<form" in asked.text
    assert client.get("/?token=wrong", follow_redirects=False).status_code == 401
    entered = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert entered.status_code == 303 and entered.headers["location"] == "/"
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    assert client.get("/").status_code == client.get("/api/metrics?run=first").status_code == 200
    client.cookies.clear()
    assert client.get("/api/metrics?run=first", headers={"Cookie": "headrace_board=wrong"}).status_code == 401
    assert client.get("/api/metrics?run=first", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


# -- the command ----------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["board", *arguments]) == cli.BAD_INPUT
    return capsys.readouterr().err


def test_what_the_command_refuses(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "not a directory: name the one that holds your runs" in refused(capsys, str(tmp_path / "none"))
    assert "can read the prompts and completions of all runs; give it --token-file" in refused(
        capsys, str(runs), "--host", "0.0.0.0"
    )
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    assert "use at least 16" in refused(capsys, str(runs), "--token-file", str(tmp_path / "short"))
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another port" in refused(capsys, str(runs), "--port", port)


def test_the_board_of_a_run_lives_as_long_as_the_run(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with beside(runs, True):
        output = capsys.readouterr().out
        place = re.search(r"http://([\d.]+):(\d+)", output)
        assert place and "2 runs of" in output
        assert b"headrace board" in urllib.request.urlopen(place[0], timeout=60).read()
    with pytest.raises(OSError), socket.create_connection((place[1], int(place[2])), timeout=5):
        pass
    with beside(tmp_path / "new" / "runs", True):
        assert "no run yet of" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
