"""Whether the machines of a run see one directory: each writes a file there, in the way of checkpoints and weights, and each reads those of all
others. Two machines that have different directories under one path, or one that sees another's files late, would be noticed in the middle of a run."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace.commands.installed.doctor import DoctorFinding
from headrace.processes.placed.host import NodeHost
from headrace.run.config import RunConfig
from headrace.run.seats import ranks_of

SEEN = 30.0
"""Seconds in which a machine must see what another one has written. NFS keeps what it knows of a directory for as long, unless it is asked not to."""

WHAT = "shared directory"


class AskedMachine(Protocol):
    """A machine: `Hosted`, as far as it is wanted here."""

    async def ask(self, method: str, *values: Any) -> Any: ...


class ThisMachine:
    """Protocol `AskedMachine`."""

    async def ask(self, method: str, *values: Any) -> Any:
        return await getattr(NodeHost(), method)(*values)


class SharedPlace(NamedTuple):
    """A directory that all machines have to see."""

    directory: Path
    use: str
    setting: str


def shared_places(config: RunConfig) -> list[SharedPlace]:
    """Returns the directories that machines of this run share."""
    found = []
    if ranks_of(config):
        found.append(SharedPlace(Path(config.out), "checkpoints, which rank 0 writes and all ranks read", "out"))
    if config.engine.shared_dir:
        found.append(SharedPlace(Path(config.engine.shared_dir), "weights as files", "engine.shared_dir"))
    kind, _, place = config.orchestration.bus.partition(":")
    if kind == "jsonl":
        found.append(SharedPlace(Path(place), "the bus", "orchestration.bus"))
    return [one._replace(directory=one.directory.absolute()) for one in found]


class SharedCheck:
    """The files of one examination."""

    def __init__(self, places: list[SharedPlace], within: float = SEEN) -> None:
        self._places, self._within, self._mark = places, within, secrets.token_hex(8)
        self._left: dict[str, dict[Path, str]] = {}
        """The problem of each directory in which a machine could not write, or an empty string; by machine."""
        self._numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def machines(self) -> int:
        """The number of machines that have written."""
        return len(self._left)

    def wrote(self, who: str) -> bool:
        """Whether a machine was asked to write."""
        return who in self._left

    @contextmanager
    def open(self) -> Iterator[None]:
        """Makes the directories where they are missing, as the run would, and removes the files of this examination in the end."""
        for place in self._places:
            with contextlib.suppress(OSError):
                place.directory.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            for place in self._places:
                for path in place.directory.glob(f".shared-{self._mark}-*"):
                    with contextlib.suppress(OSError):
                        path.unlink()

    async def leave(self, who: str, machine: AskedMachine) -> None:
        """Has a machine write its files."""
        said = {
            place.directory: await machine.ask("leave", *self._file(who, place.directory)) for place in self._places
        }
        self._left[who] = said

    async def findings(self, who: str, machine: AskedMachine) -> list[DoctorFinding]:
        """Has a machine read the files of all others that could write theirs, and remove its own where the run's machine does not see it."""
        found = [await self._finding(who, machine, place) for place in self._places]
        for place in self._places:
            path, _ = self._file(who, place.directory)
            if not await asyncio.to_thread(Path(path).exists):
                await machine.ask("drop", path)
        return found

    async def _finding(self, who: str, machine: AskedMachine, place: SharedPlace) -> DoctorFinding:
        directory, own = place.directory, self._left[who][place.directory]
        remedy = f"mount it under the same path on all machines (NFS, say), or set {place.setting} to one that all of them see"
        if own:
            return DoctorFinding(WHAT, "bad", f"{directory} ({place.use}): cannot write into it: {own}", remedy)
        others = [one for one, said in self._left.items() if one != who and not said[directory]]
        waited = 0.0
        for other in others:
            problem, seconds = await machine.ask("find", *self._file(other, directory), self._within)
            waited += seconds
            if problem:
                said = f"{directory} ({place.use}): what {other} wrote {problem} within {self._within:g} s"
                return DoctorFinding(WHAT, "bad", said, remedy)
        seen = f"files of {len(others)} other{'' if len(others) == 1 else 's'} seen after {waited:.1f} s"
        return DoctorFinding(WHAT, "ok", f"{directory} ({place.use}): {seen}")

    def _file(self, who: str, directory: Path) -> tuple[str, str]:
        """The path of a machine's file, and the word that it is made of."""
        number = self._numbers.setdefault(who, len(self._numbers))
        return str(directory / f".shared-{self._mark}-{number}"), f"{self._mark} {number}\n"


async def until_all(check: SharedCheck, machine: AskedMachine, everyone: asyncio.Event, between: float = 2.0) -> None:
    """Waits for the other machines, and asks this one for the time meanwhile: a worker that hears nothing would leave."""
    while check and not everyone.is_set():
        await machine.ask("clock")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(between):
                await everyone.wait()
