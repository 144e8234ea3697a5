"""Ends agents that hold more memory than they may, each with all that it started.

An agent is a session of processes. A limit of the kernel holds for each process alone (`AgentProcess` sets one too, which stops a process
that takes much at once), so the sum over a session is looked at every second. Pages that several processes share count once in it
(`Pss` of `/proc/PID/smaps_rollup`); finding that out takes long, so it is done only where the sum of all resident pages is too large.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

SECONDS = 1.0
"""Time between two looks."""

Hogged = Callable[[int], None]
"""Called with the bytes that an agent holds when these are too many."""


class MemoryWatch:
    def __init__(self, limit: int, seconds: float = SECONDS) -> None:
        """`limit`: bytes of one agent; 0 sets no limit."""
        self._limit, self._seconds = limit, seconds
        self._watched: dict[int, Hogged] = {}
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self, session: int, hogged: Hogged) -> Iterator[None]:
        if not self._limit:
            yield
            return
        self._watched[session] = hogged
        self._looking = self._looking or asyncio.create_task(self._look())
        try:
            yield
        finally:
            del self._watched[session]

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            for session, held in (await asyncio.to_thread(held_by, tuple(self._watched), self._limit)).items():
                if hogged := self._watched.get(session):
                    hogged(held)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


def held_by(sessions: Iterable[int], limit: int) -> dict[int, int]:
    """Returns the bytes that those sessions hold that hold more than the limit. Empty where there is no /proc."""
    resident: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for session, process, held in _resident(frozenset(sessions)):
        resident[session][process] = held
    large = {session: held for session, held in resident.items() if sum(held.values()) > limit}
    found = {session: sum(map(_own, held, held.values())) for session, held in large.items()}
    return {session: held for session, held in found.items() if held > limit}


def _resident(sessions: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """Yields session, process and resident bytes of all processes of these sessions (proc(5): fields 6 and 24 of `stat`)."""
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
            session, pages = int(fields[3]), int(fields[21])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        if session in sessions:
            yield session, int(place.parent.name), pages * mmap.PAGESIZE


def _own(process: int, resident: int) -> int:
    """Bytes of a process, where a page that several have counts for each in part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return resident
