"""Processes that play rollouts with a taskset: the program `taskset_player.py`, in the interpreter that has verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.errors import RolloutFailed
from headrace.episodes.environments.verifiers import taskset_player
from headrace.processes.asked_process import AskedProcess, ProcessLost
from headrace.processes.frames import StreamEnded
from headrace.settings.extras import foreign_variables

OPENING = 600.0
"""Seconds that a taskset may take to load its tasks."""
GRACE = 30.0
"""Seconds that a rollout may take to end after it was cancelled. Then its process is killed: something in it blocks all others."""


class TasksetOpened(msgspec.Struct, frozen=True, tag_field="say", tag="opened"):
    tasks: int
    """Tasks that are drawn from; 0 if rollouts bring their own."""
    held_out: int


class TasksetRefused(msgspec.Struct, frozen=True, tag_field="say", tag="refused"):
    why: str


class AgentRun(msgspec.Struct, frozen=True):
    """The part that one agent of the taskset's environment had in a rollout."""

    session: str
    """The value of its requests' session header."""
    rewards: dict[str, float | str]
    """A text is one that JSON has no number for."""
    trained: bool


class TasksetEnded(msgspec.Struct, frozen=True, tag_field="say", tag="ended"):
    """The end of a rollout."""

    id: int
    runs: tuple[AgentRun, ...] = ()
    """Agents that asked the policy."""
    failed: str = ""
    """The reason why it has no rewards; empty if it has."""
    reason: str = "environment_raised"
    traceback: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TasksetOpened | TasksetRefused | TasksetEnded).decode


def player_words(python: str) -> list[str]:
    """The command of the program. -P: a module of ours must not be taken for one of its packages."""
    return [python, "-P", taskset_player.__file__]


def player_variables(python: str) -> dict[str, str]:
    """The program's environment variables. A proxy of the user's must not be asked for the gateway."""
    own = foreign_variables(python)
    direct = ",".join(filter(None, [own.get("NO_PROXY") or own.get("no_proxy"), "127.0.0.1"]))
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **own, "NO_PROXY": direct, "no_proxy": direct}


class TasksetProcess(AskedProcess[Mapping[str, Any], TasksetOpened | TasksetRefused | TasksetEnded]):
    begins = "open", "the taskset"
    begins_within = OPENING

    def __init__(self, python: str, settings: Mapping[str, Any], log: Path | None) -> None:
        super().__init__("taskset", player_words(python), log, foreign=player_variables(python))
        self._settings = settings
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[TasksetEnded]] = {}
        self.farewell = GRACE

    @property
    def playing(self) -> int:
        """Number of rollouts."""
        return len(self._ends)

    def first_order(self) -> Mapping[str, Any]:
        return self._settings

    def pack(self, order: Mapping[str, Any]) -> bytes:
        return _encode(order) + b"\n"

    async def receive(self) -> TasksetOpened | TasksetRefused | TasksetEnded:
        line = await self.reports.readline()
        if not line.endswith(b"\n"):
            raise StreamEnded("the process has closed its output")
        return _decode(line)

    def accept(self, first: TasksetOpened | TasksetRefused | TasksetEnded) -> str:
        match first:
            case TasksetOpened():
                return ""
            case TasksetRefused(why=why):
                return why
        return "has ended a rollout that nobody began"

    def play(self, asked: Mapping[str, Any]) -> tuple[int, asyncio.Future[TasksetEnded]]:
        """Begins a rollout, and returns its number and its end. This and the end raise RolloutFailed if the process is lost."""
        if not self.alive:
            raise self._lost()
        id = next(self._numbers)
        self._ends[id] = asyncio.get_running_loop().create_future()
        self.send({"play": id, **asked})
        return id, self._ends[id]

    def part(self, id: int) -> None:
        """Cancels a rollout that has not ended, and kills the process if it does not end then."""
        end = self._ends[id]
        if end.done() or not self.alive:
            del self._ends[id]
            return
        self.send({"cancel": id})
        self.finish(self._parted(id, end))

    async def _parted(self, id: int, end: asyncio.Future[TasksetEnded]) -> None:
        with contextlib.suppress(RolloutFailed):
            try:
                await self.within(GRACE, end)
            except TimeoutError:
                self.kill("was killed, because a rollout that was over did not end")
        del self._ends[id]

    def obey(self, report: TasksetOpened | TasksetRefused | TasksetEnded) -> None:
        if isinstance(report, TasksetEnded) and (end := self._ends.get(report.id)) and not end.done():
            end.set_result(report)
        elif isinstance(report, TasksetRefused):
            self.why = report.why

    def forsake(self) -> None:
        for end in self._ends.values():
            if not end.done():
                end.set_exception(self._lost())
                end.exception()  # read, though nobody may wait for it

    def _lost(self) -> RolloutFailed:
        return RolloutFailed("environment_died", f"its process {self.why}")


class TasksetPool:
    """The processes of a run: each new rollout goes to the one that plays the fewest."""

    def __init__(self, python: str, settings: Mapping[str, Any], width: int, log: Path | None) -> None:
        self._python, self._settings, self._width, self._log = python, settings, width, log
        self._processes: list[TasksetProcess] = []
        self._starting = asyncio.Lock()

    async def least_busy(self) -> TasksetProcess:
        """Starts as many processes as are allowed, one with each of the first rollouts. Raises RolloutFailed if none can be started."""
        async with self._starting:
            self._processes = [candidate for candidate in self._processes if candidate.alive]
            if len(self._processes) < self._width:
                process = TasksetProcess(self._python, self._settings, self._log)
                try:
                    await process.start()
                except ProcessLost as lost:
                    raise RolloutFailed("environment_died", str(lost)) from None
                self._processes.append(process)
            return min(self._processes, key=lambda candidate: candidate.playing)

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes if process.alive]

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))
        self._processes.clear()
