"""The runs of a directory, each with its state and its last numbers. A run is known by the start and the end of its files, whatever their
size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.core.types import Struct
from headrace.facts import run_state
from headrace.facts.facts import Evaluated, Planned, RunEnded, RunStarted, TicketDrawn
from headrace.facts.index_file import DIGEST, read_digest
from headrace.facts.records import METRICS, StepRow, decode_metrics
from headrace.facts.run_state import RunState
from headrace.processes.health.live_status import judge, read_live

HEAD, TAIL = 1 << 16, 1 << 18
"""Bytes that are read at the start and at the end of a file."""
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
    living: bool
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


class RunList:
    def __init__(self, directory: Path, held: Callable[[Path], bool]) -> None:
        """`held`: whether a process trains in a directory."""
        self.directory, self._held = directory, held
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
        return sorted(found, key=lambda one: (-one.started, one.name))

    def _line(self, name: str, path: Path) -> RunLine | None:
        try:
            changed = (path / METRICS).stat().st_mtime
            state = self._state(path)
        except OSError:  # it was deleted in between
            return None
        status = judge(state, read_live(path), self._held(path), time.time())
        started = state.started
        evals = [one for one in state.evals if one.prompts]
        return RunLine(
            name=name,
            headline=started.headline if started else "",
            life=status.life,
            words=status.words,
            living=status.live is not None and status.life in ("alive", "silent", "starting"),
            step=state.step,
            steps=started.steps if started else 0,
            reward=run_state.recent_reward(state),
            held_out=evals[-1].reward_mean if evals else None,
            cost=state.costs.total if state.costs.prices else None,
            seconds=state.now,
            changed=changed,
            started=changed - state.now,
        )

    def _state(self, path: Path) -> RunState:
        """Folds the start and the end of the file, unless it is as it was."""
        with (path / METRICS).open("rb") as file:
            found = os.fstat(file.fileno())
            key = (found.st_ino, found.st_size, found.st_mtime_ns)
            if path in self._known and self._known[path][0] == key:
                return self._known[path][1]
            start = max(0, found.st_size - TAIL)
            head = _whole(file.read(HEAD)) if start else []
            file.seek(start)
            tail = _whole(file.read(TAIL))[bool(start) :]
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
        if start and state.costs.prices and (digest := read_digest(path / DIGEST, path)):
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
