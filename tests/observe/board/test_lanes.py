"""Rollouts over time: what is drawn against the facts and the tokens of a small run in virtual time, and what a long run costs."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from test_board import board_of

from headrace.core.reports import LoadReport
from headrace.core.types import Episode, Prompt
from headrace.core.weights import WeightUpdate
from headrace.durable.spelling import encode
from headrace.episodes.rollout import RolloutConfig
from headrace.facts.facts import GroupEnded, RunStarted, TicketDrawn, WeightsLive
from headrace.facts.recorder import Recorder
from headrace.facts.records import METRICS
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world import virtual_time
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_environments import scripted
from headrace.testing.fake_scorer import FakeScorer
from headrace.testing.fake_trainer import FakeTrainer
from headrace.views.board import swimlanes
from headrace.views.board.followed_run import NEAR, FollowedRun
from headrace.views.board.swimlanes import KINDS, MOST_LANES, LaneQuery, LaneWindow, Swaps, read_lanes, stretches
from support.fact_stream import write_run
from support.fake_world import FakeWorld

TOKEN, TOOL, SCORING = 0.1, 0.35, 0.2
GROUPS, SIZE, STEPS = 3, 3, 12


def reward(prompt: Prompt, episode: Episode) -> float:
    """Every fifth prompt has no contrast; a few rollouts fail."""
    number = int(prompt.id.rpartition("/")[2])
    assert number % 7 != 4 or sum(episode.last.tokens) % 3, "a reward that fails now and then"
    return 1.0 if number % 5 == 3 else float(episode.sampled)


def simulated(directory: Path, turns: int) -> Path:
    """A run in virtual time whose sixth attempt of a step is skipped: token k of a turn is sampled (k + 1) · TOKEN seconds after it was asked for."""
    world = FakeWorld(
        directory / "run",
        StalenessConfig(groups_per_step=GROUPS, max_lag=2),
        engine=FakeEngine(TOKEN, 0.05, lambda rng: rng.choice((2, 3, 5, 8, 30))),
        trainer=FakeTrainer(0.7, publish_seconds=0.1, skip=lambda attempt: attempt == 5),
        scorer=FakeScorer(SCORING, reward),
        rollout=RolloutConfig(SIZE, 30, patience=1000),
        environment=scripted(turns, seconds=TOOL),
        steps=STEPS,
    )
    virtual_time.run(world.run())
    recorder = Recorder(directory / "run")
    sizes = {"groups_per_step": GROUPS, "group_size": SIZE, "slots": 3 * GROUPS, "window": 1, "max_lag": 2}
    recorder.record(RunStarted(0.0, "simulated", "", seed=0, steps=STEPS, where={}, **sizes))
    for fact in world.facts.facts:
        recorder.record(fact)
    recorder.close()
    return directory / "run"


@pytest.fixture(scope="module", params=[1, 3], ids=["one turn", "three turns"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("lanes"), request.param)


def lines(run_dir: Path, fact: str) -> list[dict[str, Any]]:
    return [one for line in (run_dir / METRICS).open() if (one := json.loads(line))["fact"] == fact]


def journaled(run_dir: Path) -> dict[int, list[list[tuple[int, list[int]]]]]:
    """Tokens and their versions, of each turn of each rollout of each ticket, from the bare journal."""
    found = {}
    for path in sorted((run_dir / "journal").glob("*.segment")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at + 4 : at + 8], "little")
            record = msgspec.msgpack.decode(zstandard.decompress(data[at + 37 : at + length]))
            at += length
            if record["kind"] != "Ready":
                continue
            group = record["group"]
            found[group["ticket"]] = [
                [_versions(turn["completion"]) for turn in one["episode"]["turns"]] for one in group["scored"]
            ]
    return found


def _versions(done: dict[str, Any]) -> tuple[int, list[int]]:
    starts = [span["start"] for span in done["spans"]]
    count = len(done["tokens"])
    versions = [
        span["version"]
        for span, end in zip(done["spans"], [*starts[1:], count], strict=True)
        for _ in range(span["start"], end)
    ]
    return count, versions


def window(run_dir: Path, first: int, last: int) -> LaneWindow:
    followed = FollowedRun(run_dir)
    followed.catch_up(60)
    return read_lanes(run_dir, followed.state.started, first, last)


# -- what is drawn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, STEPS), (4, 6), (STEPS, STEPS)])
def test_a_window_has_the_rollouts_that_were_under_way_in_its_steps(run: Path, first: int, last: int):
    steps = {line["report"]["step"] + 1: line for line in lines(run, "StepTrained")}
    start = steps[first - 1]["t"] if first > 1 else 0.0
    newest = max(json.loads(line)["t"] for line in (run / METRICS).open())
    end = steps[last]["t"] if last < STEPS else newest
    drawn = {line["ticket"]: line["t"] for line in lines(run, "TicketDrawn")}
    over = {ticket: step["t"] for step in steps.values() for ticket in step["tickets"]}
    ends = lines(run, "GroupEnded")
    over |= {one["ticket"]: one["t"] for one in ends if one["outcome"] != "ready"}
    sizes = {one["ticket"]: len(one["lengths"]) + sum(one["failures"].values()) for one in ends}
    assert any(one["failures"] for one in ends) and any(one["outcome"] == "dropped" for one in ends)
    expected = [
        (ticket, rollout)
        for ticket, t in drawn.items()
        if t <= end and over.get(ticket, newest) >= start
        for rollout in range(sizes.get(ticket, 1))
    ]
    found = window(run, first, last)
    assert (found.start, found.end, found.missing, found.cut) == (start, end, 0, False)
    assert [(story.ticket, rollout) for story, rollout in found.of_kind("all")] == expected
    trained = {ticket for step in steps.values() for ticket in step["tickets"]}
    scored = {one["ticket"]: len(one["lengths"]) for one in ends}
    kinds = {kind: [(s.ticket, i) for s, i in found.of_kind(kind)] for kind in KINDS}
    assert kinds["trained"] == [one for one in expected if one[0] in trained and one[1] < scored[one[0]]]
    gone = {one["ticket"] for one in ends if one["outcome"] != "ready"}
    assert kinds["dropped"] == [one for one in expected if one[0] in gone or one[1] >= scored.get(one[0], 9)]


def test_every_token_lies_in_the_stretch_of_its_version(run: Path):
    """Also without the journal: what was live when a token was sampled is what sampled it."""
    found, tokens = window(run, 1, STEPS), journaled(run)
    groups = board_of(run.parent)._browser("run", board_of(run.parent).run("run")).groups(list(tokens), 1 << 30)
    assert set(groups) == set(tokens)
    met = checked = 0
    for story in found.stories:
        for rollout, turns in enumerate(tokens.get(story.ticket, ())):
            moments = story.turns_of(rollout)
            assert len(moments) == len(turns)
            for place, ((count, versions), interval) in enumerate(zip(turns, moments, strict=True)):
                assert interval[1] - interval[0] == pytest.approx(TOKEN * count, abs=2e-3)
                own = groups[story.ticket].scored[rollout].episode.turns[place : place + 1]
                known = stretches(interval, found.swaps, own)
                worked_out = stretches(interval, found.swaps, tokens=count)
                assert sum(one.tokens for one in known) == count
                assert known[-1].end == interval[1]
                assert known[0].start in (interval[0], *found.swaps.between(*interval)), "a wait for the first token"
                for given in (known, worked_out):
                    for number, version in enumerate(versions):
                        t = interval[0] + TOKEN * (number + 1)
                        here = {one.version for one in given if one.start - 2e-3 <= t <= one.end + 2e-3}
                        assert version in here
                        checked += 1
                met += len(known) > 1
    assert met > 3 and checked > 100, "no rollout met a swap"


def test_waits_lie_between_the_last_token_the_score_and_the_step(run: Path):
    for story in window(run, 1, STEPS).stories:
        if story.played is None:
            continue
        last = [turns[-1][1] for i in range(len(story.played.lengths)) if (turns := story.turns_of(i))]
        if not story.played.failures:  # a failed rollout may have been the last one
            assert story.played.t - max(last) == pytest.approx(SCORING, abs=2e-3)
        for rollout in range(len(story.played.lengths)):
            moments = story.turns_of(rollout)
            gaps = [after[0] - before[1] for before, after in pairwise(moments)]
            assert gaps == pytest.approx([TOOL] * len(gaps), abs=2e-3)
        if story.step:
            assert story.step.t - story.step.report.seconds >= story.played.t - 1e-9


def test_late_rollouts_are_those_whose_weights_changed_as_often_as_the_bound(run: Path):
    found, tokens = window(run, 1, STEPS), journaled(run)
    steps = {ticket: line["report"]["step"] for line in lines(run, "StepTrained") for ticket in line["tickets"]}
    late = {(story.ticket, rollout) for story, rollout in found.of_kind("late")}
    asked = {
        (ticket, rollout): steps[ticket] - turns[0][1][0]
        for ticket, rollouts in tokens.items()
        if ticket in steps
        for rollout, turns in enumerate(rollouts)
    }
    assert late and late >= {one for one, lag in asked.items() if lag >= 2}
    assert all(asked[one] >= 1 for one in late)


# -- the page's answer ------------------------------------------------------------------------------------------------------


def answer(directory: Path, name: str = "run", **given: Any) -> str:
    return board_of(directory).lanes(name, LaneQuery(**given))


def lanes(html: str) -> list[tuple[int, int | None, str]]:
    """Ticket, rollout and marks of every lane."""
    found = re.findall(
        r'<g class="lane" data-ticket="(\d+)"(?: data-rollout="(\d+)")?(?: data-gone="1")?>(.*?)</g>', html, re.DOTALL
    )
    return [(int(ticket), int(rollout) if rollout else None, marks) for ticket, rollout, marks in found]


def test_the_answer_has_the_same_lanes_with_their_times_and_reasons(run: Path):
    found, html = window(run, 4, 6), answer(run.parent, steps=(4, 6))
    origin = float(re.search(r'data-origin="([\d.]+)"', html)[1])  # type: ignore[index]
    expected = found.of_kind("all")
    shown = lanes(html)
    assert [ticket for ticket, _, _ in shown] == [story.ticket for story, _ in expected]
    assert f"rollouts 1 to {len(expected)} of {len(expected)}" in html
    seen = 0
    for (_, rollout, marks), (story, _) in zip(shown, expected, strict=True):
        bars = re.findall(r'<rect class="v\d[^"]*" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', marks)
        if rollout is not None:
            ends = [origin + float(x) + float(width) for x, width in bars]
            assert max(ends) == pytest.approx(story.turns_of(rollout)[-1][1], abs=5e-3)
            seen += 1
        if story.gone:
            assert story.gone.reason.replace("_", " ") in unescape(marks)
        if story.step and rollout is not None:
            assert f"trained by step {story.step.report.step + 1}," in marks
    assert seen > 10 and "was not recorded" in html, "no failed rollout"


def test_lanes_that_are_left_out_are_counted_and_a_click_further(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(swimlanes, "MOST_LANES", 7)
    whole = [(story.ticket, i) for story, i in window(run, 2, 7).of_kind("trained")]
    seen, start = [], 0
    while True:
        html = answer(run.parent, steps=(2, 7), kind="trained", start=start)
        assert len(lanes(html)) <= 7 and f"of {len(whole):,} ·" in html
        seen += [ticket for ticket, _, _ in lanes(html)]
        more = re.search(r'data-lane="(\d+)">([\d,]+) more', html)
        if not more:
            break
        assert int(more[2].replace(",", "")) == len(whole) - len(seen)
        start = int(more[1])
    assert seen == [ticket for ticket, _ in whole]


def test_what_a_run_did_not_record_is_said(tmp_path: Path):
    """Moments of turns (an earlier release), tokens in the journal, steps."""
    run_dir = simulated(tmp_path, 1)
    old = re.sub(rb',"times":\[[\[\]\d.,]*\]', b"", (run_dir / METRICS).read_bytes())
    (run_dir / METRICS).write_bytes(old)
    html = answer(tmp_path, steps=(4, 6))
    assert "The moments of turns were not recorded" in html and len(lanes(html)) > 10
    for story in window(run_dir, 4, 6).stories:
        assert story.turns_of(0) == [] and (story.played is None or story.sampled == story.played.t)
    shutil.rmtree(run_dir / "journal")
    assert re.search(r"\d+ groups cannot be found in the journal \(yet\)", answer(tmp_path, steps=(4, 6)))
    first = old.splitlines(keepends=True)
    (run_dir / METRICS).write_bytes(b"".join(first[:5]))
    begun = answer(tmp_path)
    assert "its rollouts are sampled and scored, still under way" in begun
    (run_dir / METRICS).write_bytes(first[0])
    assert "No rollout of this kind." in answer(tmp_path)


def test_a_stretch_without_its_swap_is_placed_by_its_share_of_the_tokens():
    swaps = Swaps([_live(5.0, 3), _live(9.0, 4)], before=2)
    assert [swaps.live_at(t) for t in (4.9, 5.0, 9.5)] == [2, 3, 4]
    assert [stretch[:3] for stretch in stretches((4.0, 10.0), swaps)] == [(4.0, 5.0, 2), (5.0, 9.0, 3), (9.0, 10.0, 4)]
    assert stretches((6.0, 8.0), swaps, tokens=9) == [(6.0, 8.0, 3, 9, False)]


def _live(t: float, version: int) -> WeightsLive:
    update = WeightUpdate(version=version, kind="full", fingerprint="", nbytes=1, seconds=0.0)
    return WeightsLive(t, update, LoadReport(version, 0.0, 0.0))


# -- a long run ---------------------------------------------------------------------------------------------------------------


def long_run(directory: Path, steps: int) -> Path:
    """As `FactStream`, again and again."""
    directory.mkdir()
    write_run(directory / "short")
    short = (directory / "short" / METRICS).read_bytes().splitlines(keepends=True)
    begin = next(i for i, line in enumerate(short) if b'"TicketDrawn"' in line)
    with (directory / METRICS).open("wb") as file:
        file.writelines(short[:1])
        for step in range(steps):
            t, tickets = 4.0 * step, range(6 * step, 6 * step + 6)
            for ticket in tickets:
                file.write(encode(TicketDrawn(t, ticket, "p")) + b"\n")
                times = tuple((3.0, 0.1 * i) for i in range(8))
                ended = GroupEnded(t + 3, ticket, "p", "ready", lengths=(9,) * 8, seconds=3.0, times=times)
                file.write(encode(ended) + b"\n")
            row = next(line for line in short[begin:] if b'"StepTrained"' in line)
            fact = json.loads(row) | {"t": t + 4, "tickets": list(tickets)}
            fact["report"] |= {"step": step, "version": step + 1, "seconds": 0.5}
            file.write(json.dumps(fact, separators=(",", ":")).encode() + b"\n")
            file.write(encode(_live(t + 4, step + 1)) + b"\n")
    return directory


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes that are read are counted by Linux")
def test_a_window_of_a_long_run_is_bounded_in_rows_and_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    most = 300_000
    monkeypatch.setattr("headrace.views.board.followed_run.MOST", most)
    run_dir = long_run(tmp_path / "long", 1500)
    size = (run_dir / METRICS).stat().st_size
    assert size > 12 * most
    followed = FollowedRun(run_dir)
    followed.catch_up(60)
    state, columns = followed.state, followed.numbers.columns

    def ask(steps: tuple[int, int]) -> tuple[str, int]:
        before = bytes_read()
        html = swimlanes.swimlanes(run_dir, state, columns, LaneQuery(steps=steps), lambda tickets, most: {})
        return html, bytes_read() - before

    ask((1, 2))
    html, cost = ask((700, 702))
    assert 8 * 6 * 3 <= len(lanes(html)) <= MOST_LANES and "More steps" not in html
    assert cost < most + 10 * NEAR < size, "more is read than a window and the halves in which it is looked for"
    html, cost = ask((300, 1400))
    assert len(lanes(html)) == MOST_LANES and "More steps would take too long to read at once." in html
    assert re.search(r"rollouts 1 to 160 of [\d,]+ · steps 300 to \d+ ", html), "what is left out is counted"
    assert cost < most + 10 * NEAR


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
