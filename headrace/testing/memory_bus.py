"""A bus in memory. It ships for tests: all its users are in one process, and in virtual time if their loop is."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from headrace.run.hosts.bus.bus_port import LEASE, Letter, Notice, Posting
from headrace.run.hosts.bus.directory_bus import LetterBox

T = TypeVar("T")


class MemoryServer:
    """The content of a bus. Every user has a `MemoryBus` of its own on it."""

    def __init__(self, lease: float = LEASE) -> None:
        self._lease = lease
        self.changed = asyncio.Condition()
        self.numbers = itertools.count(1)
        self.lose()

    def lose(self) -> None:
        """Loses everything, as a server that keeps nothing on a disk does when it is started again."""
        self.boxes: defaultdict[str, LetterBox] = defaultdict(lambda: LetterBox(self._lease))
        self.board: dict[str, Notice] = {}
        self.list: dict[str, bytes] = {}

    def state(self) -> Callable[[], None]:
        """Returns what gives the server its present content again, as one has it that loses its last writes, or whose replica takes over."""
        boxes = {name: copy.deepcopy(box) for name, box in self.boxes.items()}
        board, listed = dict(self.board), dict(self.list)

        def again() -> None:
            self.lose()
            self.boxes.update({name: copy.deepcopy(box) for name, box in boxes.items()})
            self.board, self.list = dict(board), dict(listed)

        return again


class MemoryBus:
    """Protocol `Bus`."""

    def __init__(self, server: MemoryServer | None = None) -> None:
        self._server = server or MemoryServer()
        self._given: set[str] = set()

    async def register(self) -> None:
        """Does nothing: nobody looks for runs here."""

    async def post(self, posting: Posting) -> None:
        self._post(posting)
        await self._tell()

    async def claim(self, queue: str, who: str, most: int, wait: float = 0.0) -> list[Letter]:
        def claimed() -> list[Letter]:
            now, box = asyncio.get_running_loop().time(), self._server.boxes[queue]
            letters = box.free(who, most, now, self._given)
            box.hold([letter.id for letter in letters], who, now)
            self._given |= {letter.id for letter in letters}
            return letters

        return await self._until(claimed, wait)

    async def keep(self, queue: str, who: str, ids: Collection[str]) -> None:
        box = self._server.boxes[queue]
        box.hold(box.kept(ids, who), who, asyncio.get_running_loop().time())

    async def settle(self, queue: str, ids: Collection[str], then: Posting | None = None) -> None:
        if then:
            self._post(then)
        self._server.boxes[queue].settle(ids)
        await self._tell()

    async def unsettled(self, queue: str) -> set[str]:
        return self._server.boxes[queue].keys

    async def pin(self, name: str, body: bytes) -> None:
        self._server.board[name] = Notice(str(next(self._server.numbers)), body)
        await self._tell()

    async def newer(self, name: str, than: str = "", wait: float = 0.0) -> Notice | None:
        def found() -> Notice | None:
            notice = self._server.board.get(name)
            return notice if notice and notice.id != than else None

        return await self._until(found, wait)

    async def sign(self, who: str, body: bytes) -> None:
        self._server.list[who] = body

    async def signed(self) -> Mapping[str, bytes]:
        return dict(self._server.list)

    async def unsign(self, who: str) -> None:
        self._server.list.pop(who, None)

    async def wipe(self) -> None:
        self._server.boxes.clear()
        self._server.list.clear()

    async def close(self) -> None:
        """Does nothing: what is in memory has no end to close."""

    def _post(self, posting: Posting) -> None:
        number = str(next(self._server.numbers))
        self._server.boxes[posting.queue].post(Letter(number, posting.key, posting.body))

    async def _tell(self) -> None:
        async with self._server.changed:
            self._server.changed.notify_all()

    async def _until(self, look: Callable[[], T], wait: float) -> T:
        if (found := look()) or not wait:
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait), self._server.changed:
                while not (found := look()):
                    await self._server.changed.wait()
        return found or look()  # a lease may have run out meanwhile, which nobody tells
