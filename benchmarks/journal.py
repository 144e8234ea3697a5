"""The cost of being able to resume from any byte: journal, passes and checkpointed prefixes, in seconds of the
controller per step.

    python benchmarks/journal.py                          # 16 groups x 16 rollouts x 512 tokens
    python benchmarks/journal.py --run runs/demo          # what that run wrote, beside the time its steps took
    python benchmarks/journal.py --groups 8 --size 8 --tokens 24 --step-seconds 4.5
    python benchmarks/journal.py --ages 10 1000 10000     # a resume, and finding a step, in runs that are so many steps old

All data is written to a real file system, in --dir (default: the working directory), as in a run: a record for every
ticket and group, one flush to the disk per step, one frame per forward pass, and the state of groups in flight for a
checkpoint. A synthetic step has its groups sampled in one batch: as many forward passes as the longest completion has
tokens. Medians over steps. A run of some age has 4 groups x 4 rollouts x 64 tokens a step and a checkpoint five steps before its end; the
seconds are CPU time. What is opened is all that a controller reads before its workers start, and what it sets aside.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from headrace.commands.show.inspect import find_step
from headrace.core.batches import Group, Row
from headrace.core.reports import EngineStats, LagStats, LoadReport, TokenNumbers, TrainReport
from headrace.core.steps import StepOutput
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.core.weights import WeightUpdate
from headrace.durable.journal import (
    DrawnRecord,
    Journal,
    JournalStep,
    LiveRecord,
    ReadyRecord,
    SteppedRecord,
    read_steps,
)
from headrace.durable.pass_log import PassLog
from headrace.facts.facts import Accounting, EngineSample, GroupEnded, RunStarted, TicketDrawn, WeightsLive
from headrace.facts.index_file import DIGEST, NumbersIndex
from headrace.facts.recorder import Recorder
from headrace.facts.records import StepRow, read_metrics
from headrace.loop.buffer import BufferState
from headrace.loop.checkpoints import CONTROLLER, Checkpoints, ControllerState
from headrace.loop.recovery import read_saved_run
from headrace.run.config import read_config
from headrace.run.lane import Lane, open_lane
from headrace.run.resume_rules import meaning
from headrace.run.run_directory import RunDirectory

T = TypeVar("T")
COLUMNS = ("journal: encode, write", "journal: flush", "passes", "checkpoint: state in flight")


WORDS = (
    "the",
    "answer",
    "is",
    "so",
    "we",
    "add",
    "both",
    "sides",
    "and",
    "find",
    "that",
    "x",
    "equals",
    "therefore",
    "seven",
)
DIFFERENT = 20
"""Groups of each place in a step that are made; older runs repeat them under other tickets."""
NUMBERED = 32_768
"""Tokens of a step with numbers of the trainer's (`trainer/packing/plan.py`)."""


def synthetic(groups: int, size: int, tokens: int, steps: int) -> Iterator[JournalStep]:
    rng = random.Random(0)
    pool = [_group(rng, i, size, tokens) for i in range(groups * min(steps, DIFFERENT))]
    numbers = np.random.default_rng(0).standard_normal(tokens).astype(np.float32)
    for step in range(steps):
        tickets = range(step * groups, (step + 1) * groups)
        made = tuple(msgspec.structs.replace(pool[ticket % len(pool)], ticket=ticket) for ticket in tickets)
        rows = [(ticket, row) for ticket in tickets for row in range(size)][: NUMBERED // tokens]
        taken = tuple(
            TokenNumbers(*place, (numbers + k).tobytes(), (numbers * k).tobytes()) for k, place in enumerate(rows)
        )
        yield JournalStep(step, 0.0, step + 1, made, TrainReport(step, step + 1, token_numbers=taken))


def _group(rng: random.Random, ticket: int, size: int, tokens: int) -> Group:
    prompt = Prompt(f"p{ticket}", "What is the answer? " * 10, tuple(rng.randrange(50_000) for _ in range(100)))
    scored, rows = [], []
    for _ in range(size):
        drawn = tuple(rng.randrange(50_000) for _ in range(tokens))
        logprobs = tuple(np.float32(-rng.expovariate(2.0)).item() for _ in range(tokens))
        done = Completion(drawn, logprobs, (VersionSpan(0, 3, 3),), "stop", " ".join(rng.choices(WORDS, k=tokens)))
        scored.append(Scored(Episode((Turn(prompt.tokens, done),)), 1.0, {"correct": 1.0}))
        column = ((0.5,) * tokens, (True,) * tokens, (3,) * tokens)
        rows.append(Row(prompt.tokens, drawn, logprobs, *column))
    return Group(ticket, prompt, tuple(scored), tuple(rows))


def passes_of(step: JournalStep) -> list[bytes]:
    """Yields the messages of an engine that samples all rollouts of the step in one batch."""
    running = {
        f"{group.ticket}.{i}": rollout.episode.last for group in step.groups for i, rollout in enumerate(group.scored)
    }
    found = []
    for t in range(max(len(one.tokens) for one in running.values())):
        names = [name for name, one in running.items() if len(one.tokens) > t]
        rows = [running[name] for name in names]
        output = StepOutput(
            step.version,
            tuple(names),
            tuple(row.tokens[t] for row in rows),
            tuple(row.logprobs[t] for row in rows),
            (step.version,) * len(rows),
        )
        found.append(msgspec.msgpack.encode(output))
    return found


def in_flight(step: JournalStep) -> ControllerState:
    """Makes a checkpoint at a moment when all of this is half done."""
    begun = {
        f"{group.ticket}.{i}": msgspec.structs.replace(
            rollout.episode.last,
            tokens=rollout.episode.last.tokens[: len(rollout.episode.last.tokens) // 2],
            logprobs=rollout.episode.last.logprobs[: len(rollout.episode.last.logprobs) // 2],
        )
        for group in step.groups
        for i, rollout in enumerate(group.scored)
    }
    buffer = BufferState(0, (), {group.ticket: group.prompt for group in step.groups}, Accounting())
    return ControllerState(0, 0.0, {}, buffer, begun, 0)


def measure(steps: Sequence[JournalStep], directory: Path) -> tuple[list[list[float]], int, int]:
    """Returns seconds by column and step, and the bytes of the journal and of the passes."""
    journal, log = Journal(directory), PassLog(directory, 0, print)
    seconds: list[list[float]] = [[] for _ in COLUMNS]

    def timed(column: int, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        seconds[column].append(time.perf_counter() - started)

    for step in steps:
        frames, state = passes_of(step), in_flight(step)
        timed(0, lambda step=step: _write(journal, step))  # type: ignore[misc]
        timed(1, journal.flush)
        timed(2, lambda frames=frames: [log.write(frame) for frame in frames] and None)  # type: ignore[misc]
        timed(3, lambda state=state: _save(directory, state))  # type: ignore[misc]
    journal.close()
    log.close()
    nbytes = [sum(path.stat().st_size for path in directory.glob(name)) for name in ("journal/*", "passes/*")]
    return seconds, nbytes[0], nbytes[1]


def _write(journal: Journal, step: JournalStep) -> None:
    for group in step.groups:
        journal.write(DrawnRecord(step.t, group.ticket, group.prompt))
        journal.write(ReadyRecord(step.t, group))
    journal.write(SteppedRecord(step.t, step.report, tuple(group.ticket for group in step.groups)))
    journal.write(LiveRecord(step.t, step.version, "0" * 32))


def _save(directory: Path, state: ControllerState) -> None:
    (directory / "controller.msgpack").write_bytes(msgspec.msgpack.encode(state))


def of_ages(ages: Sequence[int], place: Path) -> None:
    """Prints what a resume and the search for one step cost in runs of some ages."""
    print(
        "| steps | journal, MB | B a token | metrics, MB | open a resume, s | of it: journal | metrics | the same, all metrics read | find one step, s |\n"
        + "|---:" * 9
        + "|"
    )
    for age in ages:
        run_dir = place / "runs" / str(age)
        run_dir.mkdir(parents=True)
        state = _old_run(run_dir, age)
        sizes = [
            sum(one.stat().st_size for one in run_dir.glob(name))
            for name in ("journal/*", "journal.*", "metrics.jsonl")
        ]
        nbytes, metrics = sum(sizes[:2]), sizes[2]
        opened, lane = _cpu_seconds(lambda: _open(run_dir))  # noqa: B023
        assert lane.storage.recorder.state.step == age and not lane.storage.recorder.state.whole
        lane.storage.close()
        read, saved = _cpu_seconds(lambda: read_saved_run(run_dir, state, True))  # noqa: B023
        digest = run_dir / "checkpoints" / f"step-{age - 5:06d}" / DIGEST
        quick, slow = (
            _cpu_seconds(lambda: Recorder(run_dir, (), resume, waits=True, index=NumbersIndex(run_dir)))[0]  # noqa: B023
            for resume in (dataclasses.replace(saved.resume, digest=digest), saved.resume)
        )
        find, found = _cpu_seconds(lambda: find_step(run_dir, age // 2, None))  # noqa: B023
        assert saved.step == age and not saved.complaints and found.step == age // 2 - 1
        print(
            f"| {age:,} | {nbytes / 1e6:,.1f} | {nbytes / (age * 4 * 4 * 64):.1f} | {metrics / 1e6:,.1f} | {opened:.3f} | {read:.3f} | {quick:.3f} | {slow:.3f} | {find:.3f} |",
            flush=True,
        )


def _old_run(run_dir: Path, age: int) -> ControllerState:
    """Writes the directory of a run that was killed five steps after its last checkpoint. Returns the controller's state in that."""
    (run_dir / "config.toml").write_text(AGED.format(name=run_dir.name, steps=age + 10))
    journal, recorder = Journal(run_dir, flushes=False), Recorder(run_dir, index=NumbersIndex(run_dir))
    checkpoints, state = Checkpoints(run_dir / "checkpoints", keep=2), None
    recorder.record(_started(age))
    for step in synthetic(4, 4, 64, age):
        _write(journal, step)
        for fact in _facts(step):
            recorder.record(fact)
        if step.version in (age - 5, *range(0, age - 5, max(10, age // 100))):
            buffer = BufferState(4 * step.version, (), {}, Accounting())
            made_by = meaning(read_config(run_dir / "config.toml"), {})
            state = ControllerState(step.version, step.t, {}, buffer, {}, journal.position, made_by=made_by)
            asyncio.run(checkpoints.save(step.version, partial(_checkpoint, state, recorder.digest())))
    journal.close()
    assert state is not None
    return state


async def _checkpoint(state: ControllerState, digest: bytes, directory: Path) -> None:
    (directory / CONTROLLER).write_bytes(msgspec.msgpack.encode(state))
    (directory / DIGEST).write_bytes(digest)


def _open(run_dir: Path) -> Lane:
    """Does all that a controller does with its files before it starts its workers."""
    config = read_config(run_dir / "config.toml")
    with RunDirectory.reopen(run_dir) as directory:
        lane = open_lane(config, directory, True)
        lane.storage.begin()
        return lane


AGED = """
name = "{name}"
[model]
path = "fake"
[task]
kind = "reasoning_gym"
name = "chain_sum"
[rollout]
group_size = 4
max_tokens = 64
[train]
steps = {steps}
learning_rate = 1e-5
[staleness]
groups_per_step = 4
[observe]
terminal = "off"
"""


def _started(steps: int) -> RunStarted:
    return RunStarted(
        0.0,
        "aged",
        "synthetic",
        seed=0,
        steps=steps,
        groups_per_step=4,
        group_size=4,
        slots=8,
        window=1,
        max_lag=1,
        where={},
    )


def _facts(step: JournalStep) -> Iterator[Any]:
    """Yields what a run records of a step, a second for every sample of the engine."""
    number, t, rng = step.step, 4.0 * step.step, random.Random(step.step)
    lengths = tuple(len(row.tokens) for group in step.groups for row in group.rows)
    for group in step.groups:
        yield TicketDrawn(t, group.ticket, group.prompt.id)
    for second in range(4):
        stats = EngineStats(16, 3, 0.4, number * 900 + second, number * 300, number * 90, 3.6 * number + second, 0)
        yield EngineSample(t + second, stats)
    for group in step.groups:
        rewards, own = tuple(rng.random() for _ in group.rows), tuple(len(row.tokens) for row in group.rows)
        times = tuple((t + 3.2, t + 1 + rng.random()) for _ in own)
        yield GroupEnded(t + 3.2, group.ticket, group.prompt.id, "ready", rewards=rewards, lengths=own, times=times)
    lags = tuple(LagStats(str(lag), 512, 1.0, rng.random(), 0.9, 0.1, 0.01, {}, {"p50": 0.01, "max": rng.random()}) for lag in (0, 1))  # fmt: skip
    report = TrainReport(number, step.version, loss=rng.random(), grad_norm=rng.random(), lr=1e-5, entropy=rng.random(), kl=rng.random(), loss_tokens=sum(lengths), seconds=0.7, lags=lags)  # fmt: skip
    tickets = tuple(group.ticket for group in step.groups)
    yield StepRow(t + 4, report, {0: 512, 1: 512}, rng.random(), 0.4, rng.random(), 0.2, tickets, {"right": rng.random()}, lengths, 3)  # fmt: skip
    update = WeightUpdate(version=step.version, kind="full", fingerprint=f"{number:032x}", nbytes=1, seconds=0.1)
    yield WeightsLive(t + 4, update, LoadReport(step.version, 0.1, 0.001))


def _cpu_seconds(work: Callable[[], T]) -> tuple[float, T]:
    started = time.process_time()
    done = work()
    return time.process_time() - started, done


def seconds_per_step(run: Path) -> float:
    ends = [fact.t for fact in read_metrics(run) if isinstance(fact, StepRow)]
    return statistics.median(b - a for a, b in pairwise(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--step-seconds", type=float, help="what a step takes, to compare with")
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--ages", type=int, nargs="+", help="steps of the runs that are resumed")
    options = parser.parse_args()
    if options.ages:
        with tempfile.TemporaryDirectory(dir=options.dir) as place:
            of_ages(options.ages, Path(place))
        return
    made = synthetic(options.groups, options.size, options.tokens, options.steps)
    steps = list(read_steps(options.run) if options.run else made)
    takes = seconds_per_step(options.run) if options.run else options.step_seconds
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        seconds, journal, passes = measure(steps, Path(place))
    costs = [statistics.median(column) for column in seconds]
    costs[3] /= options.every
    tokens = sum(len(row.tokens) for step in steps for group in step.groups for row in group.rows) / len(steps)
    print(
        f"{len(steps)} steps of {len(steps[0].groups)} groups, {tokens:,.0f} tokens each; a checkpoint every {options.every}\n"
    )
    print("| | ms a step |\n|---|---:|")
    for name, cost in zip(COLUMNS, costs, strict=True):
        print(f"| {name} | {1000 * cost:.2f} |")
    total = sum(costs)
    print(f"| all | {1000 * total:.2f} |\n")
    print(
        f"journal {journal / len(steps) / 1e6:.2f} MB a step ({journal / len(steps) / tokens:.1f} B a token), passes {passes / len(steps) / 1e6:.2f} MB a step"
    )
    if takes:
        print(f"a step takes {takes:.2f} s: {total / takes:.2%} of it")
    print(
        f"below 2 % of every step that takes more than {total / 0.02:.2f} s ({tokens / (total / 0.02):,.0f} tokens/s)"
    )


if __name__ == "__main__":
    main()
