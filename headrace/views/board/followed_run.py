"""Runs that are read while they are written, from their own files: one of them, some steps of a long one, and the list of a directory."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headrace.core.types import Struct
from headrace.facts import run_state
from headrace.facts.facts import Evaluated, Planned, RunEnded, RunStarted, TicketDrawn
from headrace.facts.health import Kind, Standing, health
from headrace.facts.index_file import DIGEST, INDEX, IndexReader, digest_of, read_digest, save, saved_at, write_digest
from headrace.facts.number_tables import Numbers
from headrace.facts.records import METRICS, MetricsFact, StepRow, decode_metrics
from headrace.facts.run_state import RunState
from headrace.facts.thresholds import Mark
from headrace.processes.health.live_status import Follower, judge, read_live

# --- The facts of some steps of a long run, read from their place in `metrics.jsonl`.


MOST = 6 << 20
"""Bytes of facts that are read for one window."""
NEAR = 1 << 16
"""Bytes within which a place is looked for line by line."""
_STEP = re.compile(rb'\{"fact":"StepTrained","t":[^,]+,"report":\{"step":(\d+)')
_KIND = re.compile(rb'\{"fact":"(\w+)"')
OF_POOLS = (
    b"StepTrained",
    b"EngineSample",
    b"WeightsLive",
    b"Evaluated",
    b"CheckpointSaved",
    b"WorkerLost",
    b"Slept",
    b"Woke",
)
"""Facts from which the chart of the pools is drawn."""


class FactsRead(NamedTuple):
    """The facts from the end of the step before the first to the end of the last."""

    facts: list[MetricsFact]
    last: int
    """The last step whose fact was read."""
    cut: bool
    """Whether the last steps that were asked for are left out, because there would be too much to read."""
    whole: bool
    """Whether the file ends with them."""


class StepWindow(NamedTuple):
    """Some steps, counted from 1, both ends included."""

    state: RunState
    """The facts from the end of the step before the first to the end of the last."""
    first: int
    last: int
    cut: bool
    """Whether the last steps that were asked for are left out, because there would be too much to read."""


def read_window(
    run_dir: Path,
    started: RunStarted | None,
    first: int,
    last: int,
    *,
    kinds: Collection[bytes] = (),
    most: int = MOST,
) -> StepWindow:
    """Reads the facts of steps `first` to `last`. `started`: the facts' run. `kinds`: the facts that are wanted; all by default. Raises
    OSError if the file cannot be read."""
    read = read_facts(run_dir, first, last, kinds=kinds, most=most)
    state = RunState()
    state.started = started
    for fact in read.facts:
        state.fold(fact)
    return StepWindow(state, first, read.last, read.cut)


def read_facts(run_dir: Path, first: int, last: int, *, kinds: Collection[bytes] = (), most: int = MOST) -> FactsRead:
    """Reads as `read_window` does."""
    facts: list[MetricsFact] = []
    done, size, whole = first - 1, 0, True
    with (run_dir / METRICS).open("rb") as file:
        file.seek(place_after(file, first - 1))
        for line in file:
            kind = _KIND.match(line)
            size += len(line)
            if not line.endswith(b"\n"):
                break
            if size > most:
                whole = False
                break
            if kind and (not kinds or kind[1] in kinds) and (fact := decode_metrics(line[:-1])):
                facts.append(fact)
            if step := _STEP.match(line):
                done = int(step[1]) + 1
                if done >= last:
                    whole = False
                    break
    return FactsRead(facts, done, done < last and size > most, whole)


def place_after(file: BinaryIO, step: int) -> int:
    """Returns the place behind the fact of a step, counted from 1; 0 if there is none before. Steps rise along the file, so their places
    are found by halving it."""
    low, high = 0, file.seek(0, 2)
    while high - low > NEAR:
        middle = (low + high) // 2
        found = _next_step(file, middle, high)
        if found is None or found[0] > step:
            high = middle
        else:
            low = found[1]
    while (found := _next_step(file, low, high + NEAR)) and found[0] <= step:
        low = found[1]
    return low


def _next_step(file: BinaryIO, start: int, end: int) -> tuple[int, int] | None:
    """Returns the number of the first step whose fact begins in a line behind `start`, and the place behind it; None if there is none
    before `end`."""
    file.seek(start - 1 if start else 0)
    if start:
        file.readline()  # the rest of a line
    place = file.tell()
    for line in file:
        if place >= end:
            return None
        place += len(line)
        if step := _STEP.match(line):
            return int(step[1]) + 1, place
    return None


# --- A run that is read while it is written
# Its state, its numbers by step and its groups, from `metrics.jsonl` alone.


AT_ONCE = 2 << 20
"""Bytes that are read before others get their turn."""
SHORT = 8 << 20
"""Bytes of facts that are read rather than taken from a digest: all that a chart can show of them is then there."""
WORTH_SAVING = 32 << 20
"""Bytes of a file whose numbers are saved; a smaller one is read within a second or two."""


class FollowedRun(Follower):
    """Reads a run and what is added to it. What a long run's files say at their place is not read: its numbers and its sums come from the
    index and the digest that the run writes, or from those that were saved at the last visit. Several threads may ask."""

    def __init__(self, run_dir: Path, saves: Path | None = None) -> None:
        """`saves`: the directory of the indexes of runs that wrote none."""
        self._saved_at, self._lock = saved_at(saves, run_dir) if saves else None, threading.RLock()
        places = [(run_dir / INDEX, run_dir / DIGEST)]
        places += [(self._saved_at, self._saved_at.with_suffix(".digest"))] if self._saved_at else []
        self._indexes = [(IndexReader(index, run_dir), digest) for index, digest in places]
        self._indexed = 0
        super().__init__(run_dir)
        self._read_indexes()

    def _restart(self) -> None:
        if getattr(self, "_offset", 0):  # the file was cut or replaced
            for index, _ in self._indexes:
                index.restart()
        super()._restart()
        self._own, self._begun = Numbers(), False

    def _read_indexes(self) -> None:
        for index, digest in self._indexes:
            if self.unread > SHORT:
                self._begin_at(index, digest)
            if self.unread > (SHORT if self._begun else 0):
                index.catch_up()
                self._indexed = max(self._indexed, index.numbers.size)
            elif index.numbers.size:
                index.restart()  # frees its memory

    def _begin_at(self, index: IndexReader, path: Path) -> None:
        """Goes on from a digest, and from the numbers of the index up to its place."""
        digest = read_digest(path, self.run_dir)
        if digest is None or digest.size <= self._offset:
            return
        index.catch_up(until=digest.size)
        if index.numbers.size != digest.size:
            return
        self._go_on_from(digest)
        self._own, self._indexed, self._begun = index.numbers, max(self._indexed, digest.size), True
        self._own.go_on()
        index.restart()

    @property
    def numbers(self) -> Numbers:
        """The newest numbers that are known."""
        return max((self._own, *(index.numbers for index, _ in self._indexes)), key=lambda numbers: numbers.size)

    @property
    def read_share(self) -> float:
        """The share of the file whose facts are in `state`, 0 to 1."""
        return self._offset / self.size if self._offset < self.size else 1.0

    @property
    def version(self) -> int:
        """A number that changes when the numbers do."""
        return max(self._offset, self.numbers.size)

    def catch_up(self, seconds: float) -> bool:
        """Reads for about `seconds`. Returns whether there is more."""
        end = time.monotonic() + seconds
        with self._lock:
            more = True
            while more and time.monotonic() < end:
                more = self.read(AT_ONCE)
                self._own.size = self._offset
            if not more and self._saved_at and self._offset > max(WORTH_SAVING, 1.1 * self._indexed):
                self._indexed = self._offset
                save(self._saved_at, self.run_dir, self._own)
                saved = self._saved_at.with_suffix(".digest")
                write_digest(saved, digest_of(self.run_dir, self.state, self._own, lines=self._lines))
            self._read_indexes()
        return more

    def _take(self, fact: MetricsFact) -> None:
        super()._take(fact)
        self._own.take(fact, self.state)


# --- The runs of a directory, each with its state, its verdict and its last numbers
# A run is read from its digest on, and later only what was added. One with more behind its digest is known by the start and the end of its
# file, without a verdict.


BEHIND = 2 << 20
"""Bytes behind a digest that are read for the list: a tenth of a second."""
HEAD, TAIL = 1 << 16, 1 << 18
"""Bytes that are read at the start and at the end of a longer file."""
FIRST = (RunStarted, Planned)
"""Facts that the start of a file is read for."""
LAST = (RunStarted, TicketDrawn, StepRow, Evaluated, RunEnded, Planned)
"""Facts that the end of a file is read for."""


class RunLine(Struct, frozen=True, kw_only=True):
    """One run of the list."""

    name: str
    """Its directory below that of the board; unique."""
    headline: str
    life: str
    words: str
    """A sentence about its life."""
    mark: Mark
    living: bool
    verdict: Kind | None
    """Whether it learns (`facts/health.py`); None if too much of its file would have to be read."""
    step: int
    steps: int
    reward: float | None
    """Mean reward of the drawn rollouts over the last steps."""
    held_out: float | None
    cost: float | None
    """Dollars; None if no price was set."""
    seconds: float
    changed: float
    """Seconds since 1970 at which its numbers last changed."""
    started: float
    """Seconds since 1970, as the files tell."""


class ListedRun(Follower):
    """Knows the facts of a run of the list without its numbers by step. What has not changed since the last look is neither read nor judged again:
    a page asks for the list of all runs twice a second."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._tried = 0
        """Bytes of the file when its digest was read last."""
        self._judged: tuple[tuple[int, bytes, Standing], Kind] | None = None

    def catch_up(self) -> bool:
        """Reads what was added, unless that is too much. Returns whether `state` has all facts."""
        if self.unread > BEHIND and self.size != self._tried:
            self._tried = self.size
            digest = read_digest(self.run_dir / DIGEST, self.run_dir)
            if digest and digest.size > self._offset:
                self._go_on_from(digest)
        if 0 != self.unread <= BEHIND:
            self.read()
        return self.unread <= BEHIND

    def verdict(self, standing: Standing) -> Kind:
        """Returns whether the run learns, some milliseconds of work where anything has changed."""
        asked = self._offset, self._seen, standing
        if self._judged is None or self._judged[0] != asked:
            self._judged = asked, health(self.state, standing=standing).kind
        return self._judged[1]


class RunList:
    def __init__(self, directory: Path, held: Callable[[Path], bool]) -> None:
        """`held`: whether a process trains in a directory."""
        self.directory, self._held = directory, held
        self._runs: dict[Path, ListedRun] = {}
        self._known: dict[Path, tuple[tuple[object, ...], RunState]] = {}

    def places(self) -> dict[str, Path]:
        """Returns the directories of all runs by name. Nothing else of the disk can be asked for by name."""
        return dict(self._found())

    def _found(self) -> Iterator[tuple[str, Path]]:
        if (self.directory / METRICS).is_file():
            yield self.directory.resolve().name, self.directory
        for path in sorted(self.directory.glob(f"*/{METRICS}")) + sorted(self.directory.glob(f"*/*/{METRICS}")):
            yield path.parent.relative_to(self.directory).as_posix(), path.parent

    def lines(self) -> list[RunLine]:
        """Returns all runs, the newest first."""
        found = [line for name, path in self._found() if (line := self._line(name, path))]
        return sorted(found, key=lambda run_line: (-run_line.started, run_line.name))

    def _line(self, name: str, path: Path) -> RunLine | None:
        try:
            changed = (path / METRICS).stat().st_mtime
            run = self._runs.setdefault(path, ListedRun(path))
            whole = run.catch_up()
            state = run.state if whole else self._ends(path)
        except OSError:  # it was deleted in between
            return None
        status = judge(state, read_live(path), self._held(path), time.time())
        started = state.started
        evals = [evaluation for evaluation in state.evals if evaluation.prompts]
        return RunLine(
            name=name,
            headline=started.headline if started else "",
            life=status.life,
            words=status.words,
            mark=status.mark,
            living=status.live is not None and status.life in ("alive", "silent", "starting"),
            verdict=run.verdict(Standing(status.words, status.mark)) if whole else None,
            step=state.step,
            steps=started.steps if started else 0,
            reward=run_state.recent_reward(state),
            held_out=evals[-1].reward_mean if evals else None,
            cost=state.costs.total if state.costs.prices else None,
            seconds=state.now,
            changed=changed,
            started=changed - state.now,
        )

    def _ends(self, path: Path) -> RunState:
        """Folds the start and the end of the file, unless it is as it was."""
        with (path / METRICS).open("rb") as file:
            found = os.fstat(file.fileno())
            key = (found.st_ino, found.st_size, found.st_mtime_ns)
            if path in self._known and self._known[path][0] == key:
                return self._known[path][1]
            head = _whole(file.read(HEAD))
            file.seek(max(0, found.st_size - TAIL))
            tail = _whole(file.read(TAIL))[1:]
        state = RunState()
        for fact in map(decode_metrics, head):
            if isinstance(fact, FIRST):
                state.fold(fact)
        last = [fact for fact in map(decode_metrics, tail) if fact]
        for fact in last:
            if isinstance(fact, LAST):
                state.fold(fact)
            else:
                state.now = max(state.now, fact.t)
                state.costs.fold(fact)
        if state.costs.prices and (digest := read_digest(path / DIGEST, path)):
            known = digest.state  # engines may have come and gone where the file is not read
            for fact in last:
                if fact.t > known.now:
                    known.costs.fold(fact)
            state.costs = known.costs
        self._known[path] = key, state
        return state


def _whole(data: bytes) -> list[bytes]:
    """Returns the lines that are complete."""
    return data.split(b"\n")[:-1]
