"""Seconds until the board shows a long run: the list, and every tab.

    python benchmarks/board.py                              # 10⁵ steps, 10⁷ rollouts
    python benchmarks/board.py --steps 10000

The run is synthetic: the facts of one step are written again and again with other numbers, with the index and the digest that a run writes. Its journal has only the groups of the last
`--journal` steps, because that of all steps would need a hundred gigabytes; a place in it is found the same way. Times are CPU seconds of
the process, without the browser: for a run that was never opened, for one that was, and with `--without` for a run of an earlier release,
which has neither index nor digest. `--frames` also measures how smoothly a browser scrolls it (`board_frames.py`).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TypeVar

from headrace.core.batches import Group, Row
from headrace.core.reports import EngineStats, LoadReport, TrainReport
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.durable.journal import Journal, ReadyRecord
from headrace.durable.spelling import encode
from headrace.facts.facts import EngineSample, GroupEnded, RunStarted, TicketDrawn, WeightsLive
from headrace.facts.index_file import DIGEST, INDEX, NumbersIndex
from headrace.facts.number_tables import Wanted
from headrace.facts.records import METRICS, StepRow
from headrace.facts.run_state import RunState
from headrace.views.board.board_parts import PARTS
from headrace.views.board.browsing import RolloutQuery
from headrace.views.board.runs_board import RunsBoard
from headrace.views.board.swimlanes import LaneQuery

GROUPS, SIZE, TOKENS = 10, 10, 60
CURVES = [
    "reward/drawn",
    "reward/trained",
    "lag/mean",
    "train/kl",
    "train/entropy",
    "length/mean",
    "share/truncated",
    "share/no_contrast",
    "train/grad_norm",
    "train/loss",
    "time/step_seconds",
    "time/engine_tokens_per_second",
    "time/engine_idle",
    "train/clip_fraction",
]
T = TypeVar("T")


def write_run(run_dir: Path, steps: int, journaled: int, rng: random.Random) -> None:
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("seed = 0\n")
    journal = Journal(run_dir, flushes=False)
    started = RunStarted(
        0.0,
        "long",
        "synthetic",
        seed=0,
        steps=steps,
        groups_per_step=GROUPS,
        group_size=SIZE,
        slots=2 * GROUPS,
        window=1,
        max_lag=1,
        where={},
    )
    index, state, spent = NumbersIndex(run_dir), RunState(), 0.0
    with (run_dir / METRICS).open("wb") as file:
        for fact in chain([started], chain.from_iterable(facts(step, rng) for step in range(steps))):
            file.write(encode(fact) + b"\n")
            state.fold(fact)
            if isinstance(fact, StepRow):
                file.flush()
            before = time.process_time()
            index.record(fact, state)
            spent += time.process_time() - before
    index.close()
    print(f"{spent / steps * 1e6:8.0f} µs  a step, for the index and the digest that the run writes")
    for step in range(steps - journaled, steps):
        for ticket in range(step * GROUPS, (step + 1) * GROUPS):
            journal.write(ReadyRecord(4.0 * step, group(ticket, step, rng)))
    journal.close()


def facts(step: int, rng: random.Random) -> list[object]:
    t, made = 4.0 * step, []
    tickets = tuple(range(step * GROUPS, (step + 1) * GROUPS))
    lengths: tuple[int, ...] = ()
    ended: list[object] = []
    for ticket in tickets:
        own = tuple(rng.randrange(20, 250) for _ in range(SIZE))
        rewards = tuple(float(rng.random() < step / 1e5) for _ in range(SIZE))
        times = tuple((3.0, round(3 - 0.011 * length, 3)) for length in own)
        ended.append(GroupEnded(t + 3.2, ticket, f"p/{ticket}", "ready", rewards=rewards, lengths=own, seconds=3.2, times=times))  # fmt: skip
        made.append(TicketDrawn(t, ticket, f"p/{ticket}"))
        lengths += own
    made += [
        EngineSample(t + i, EngineStats(64, 3, 0.4, step * 9000, step * 3000, step * 90, 3.6 * step, 0))
        for i in range(4)
    ]
    made += ended
    report = TrainReport(step, step + 1, loss=-0.01 * rng.random(), grad_norm=rng.random(), lr=1e-5, entropy=rng.random(), kl=rng.random() / 100, loss_tokens=sum(lengths), seconds=0.7)  # fmt: skip
    made.append(StepRow(t + 4, report, {0: sum(lengths) // 2, 1: sum(lengths) // 2}, step / 1e5, 0.4, step / 1e5, 0.2, tickets, {"right": step / 1e5}, lengths, 3))  # fmt: skip
    update = WeightUpdate(version=step + 1, kind="full", fingerprint=f"{step:032x}", nbytes=1, seconds=0.1)
    made.append(WeightsLive(t + 4, update, LoadReport(step + 1, 0.1, 0.001)))
    return made


def group(ticket: int, step: int, rng: random.Random) -> Group:
    prompt = Prompt(f"p/{ticket}", f"What is {ticket} + 1?", (1, 2, 3))
    tokens = tuple(rng.randrange(1000) for _ in range(TOKENS))
    logprobs = tuple(-rng.random() for _ in range(TOKENS))
    done = Completion(tokens, logprobs, (VersionSpan(0, step, step),), "stop", f"It is {ticket + 1}.")
    scored = tuple(
        Scored(Episode((Turn(prompt.tokens, done),)), float(i % 2), {"right": float(i % 2)}) for i in range(SIZE)
    )
    row = Row(prompt.tokens, tokens, logprobs, (0.5,) * TOKENS, (True,) * TOKENS, (step,) * TOKENS)
    return Group(ticket, prompt, scored, (row,) * SIZE)


def timed(what: str, work: Callable[[], T]) -> T:
    before = time.process_time()
    done = work()
    print(f"{time.process_time() - before:8.3f} s  {what}", flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--journal", type=int, default=1000, help="steps whose groups are in the journal")
    parser.add_argument(
        "--without", action="store_true", help="also without index and digest (a run of an earlier release)"
    )
    parser.add_argument("--frames", action="store_true", help="also scroll the page in a headless Chromium")
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--keep", type=Path, help="a directory in which the run stays, or lies since the last time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as place:
        runs = (given.keep or Path(place)) / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        if not (runs / "long").exists():
            write_run(runs / "long", given.steps, given.journal, random.Random(0))
        names = (METRICS, "journal/*", INDEX, DIGEST)
        sizes = [sum(path.stat().st_size for path in (runs / "long").glob(name)) / 2**20 for name in names]
        print(
            f"{given.steps:,} steps, {given.steps * GROUPS * SIZE:,} rollouts: {sizes[0]:,.0f} MiB of metrics, {sizes[1]:,.0f} MiB of journal, "
            f"{sizes[2]:,.0f} MiB of index, {1024 * sizes[3]:,.0f} KiB of digest"
        )

        def board() -> RunsBoard:
            return RunsBoard(runs, held=lambda path: False, make_pieces=lambda path: None, saves=Path(place) / "cache")

        def curves(shown: RunsBoard, window: int = 1, within: tuple[float, float] = (-1e9, 1e9)) -> object:
            return shown.curves(["long"], CURVES, "step", window=window, within=within, points=1000)

        timed("the list of runs, never opened", board().lines)
        print("each line: a board that has just been started, and a run that it never opened")
        timed("the tab Curves: 14 of them", lambda: curves(board()))
        timed("the tab Samples: a page of the newest", lambda: board().rollouts("long", RolloutQuery()))
        for part in PARTS:
            timed(f"the tab {part}", lambda part=part: board().part("long", part))  # type: ignore[misc]
        timed("the tab Swimlanes: the newest six steps", lambda: board().lanes("long", LaneQuery()))
        shown = board()
        timed("all of it read (facts behind the digest)", lambda: shown.run("long").catch_up(1e9))
        print("the same board, asked again")
        for part in PARTS:
            timed(f"the tab {part}", lambda part=part: shown.part("long", part))  # type: ignore[misc]
        middle = given.steps // 2
        for part, width in (("pools", 40), ("pools", 600), ("drawn", 600)):
            there = (middle, middle + width - 1)
            timed(f"{width} steps in the middle, in the tab {part}", lambda p=part, t=there: shown.part("long", p, t))  # type: ignore[misc]
        timed("14 curves, smoothed", lambda: curves(shown, 100))
        timed("14 curves, a tenth of the run", lambda: curves(shown, within=(middle, middle + given.steps // 10)))
        for where in ((middle, middle + 5), (middle, middle + 599), (given.steps - 5, given.steps)):
            query = LaneQuery(steps=where)
            timed(f"swimlanes of steps {where[0]} to {where[1]}", lambda q=query: shown.lanes("long", q))  # type: ignore[misc]
        timed(
            "reading the rest of the journal",
            lambda: shown.rollouts("long", RolloutQuery(wanted=Wanted(steps=(given.steps, 1e9)))),
        )
        timed("a page of the newest rollouts", lambda: shown.rollouts("long", RolloutQuery()))
        timed(
            "a page of rollouts with reward 1, longest first",
            lambda: shown.rollouts("long", RolloutQuery(wanted=Wanted(rewards=(1, 1)), order="longest")),
        )
        if given.frames:
            from board_frames import frames

            frames(board(), given.steps)
        if given.without:
            (runs / "long" / INDEX).unlink()
            (runs / "long" / DIGEST).unlink()
            alone = board()
            timed("14 curves of a run without an index (they grow)", lambda: curves(alone))
            timed("reading it from its first byte, once", lambda: alone.run("long").catch_up(1e9))
            timed("opened again: 14 curves (from the cache)", lambda: curves(board()))
            timed("opened again: the tab overview (from the cache)", lambda: board().part("long", "overview"))


if __name__ == "__main__":
    main()
