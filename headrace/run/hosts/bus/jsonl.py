"""A bus in a directory that several machines share: no server, one file of lines a queue.

    DIRECTORY/RUN/tickets.jsonl     ["post", id, key, body]   ["hold", who, [id, ...]]   ["settle", [id, ...]]
    DIRECTORY/RUN/tickets.lock      held while a process reads what is new, decides, and appends
    DIRECTORY/RUN/board/NAME        notices, replaced as a whole
    DIRECTORY/RUN/list/WHO          who is there

A queue is what its lines make of a `LetterBox`, the same in every process. A file that holds mostly what was settled is replaced by one
that does not. Bodies are base64 (they are msgpack).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.durable.atomic_files import replace_file
from headrace.run.hosts.bus.bus_port import LEASE, Letter, Notice, Posting
from headrace.run.hosts.bus.letterbox import LetterBox
from headrace.run.hosts.bus.lines import LineFile

POLL = 0.01
"""Seconds between two looks at a file. A network's file system tells nobody that a file has changed."""

COMPACT = 8 << 20
"""Bytes of a queue's file from which on it is written anew without what was settled."""

LIVE = "live"
"""A file that a run has in its directory until it is over."""

T = TypeVar("T")


class _Queue:
    """One queue, as this process has read it."""

    def __init__(self, path: Path, lease: float) -> None:
        self.file, self._lease = LineFile(path), lease
        self.box = LetterBox(lease)
        self.given: set[str] = set()
        """The ids of letters that this process has claimed."""

    def catch_up(self, now: float) -> LetterBox:
        lines, anew = self.file.new()
        if anew:
            self.box = LetterBox(self._lease)
        for line in lines:
            match msgspec.json.decode(line):
                case ["post", str(id), str(key), str(body)]:
                    self.box.post(Letter(id, key, base64.b64decode(body)))
                case ["hold", str(who), list(ids)]:
                    self.box.hold(ids, who, now)
                case ["settle", list(ids)]:
                    self.box.settle(ids)
        return self.box

    def shorten(self) -> None:
        """Writes the file anew if little of it is needed."""
        if self.file.read < COMPACT:
            return
        lines = []
        for letter, who in self.box.letters:
            lines.append(_post(letter))
            if who:
                lines.append(_line("hold", who, [letter.id]))
        if sum(map(len, lines)) < self.file.read / 4:
            self.file.replace(lines)


class JsonlBus:
    """Protocol `Bus`. Files are read and written in threads."""

    def __init__(
        self, directory: Path, lease: float = LEASE, poll: float = POLL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`directory`: of one run; it is made. Raises OSError if it cannot be."""
        for folder in ("board", "list"):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        self._directory, self._lease, self._poll, self._clock = directory, lease, poll, clock
        self._queues: dict[str, _Queue] = {}
        self._signing = threading.Lock()

    async def register(self) -> None:
        """Enters the run into the list of runs."""
        (self._directory / LIVE).touch()

    async def post(self, posting: Posting) -> None:
        await asyncio.to_thread(self._append, posting.queue, _post(_letter(posting)))

    async def claim(self, queue: str, who: str, most: int, wait: float = 0.0) -> list[Letter]:
        return await self._until(lambda: self._claim(self._queue(queue), who, most), wait)

    async def keep(self, queue: str, who: str, ids: Collection[str]) -> None:
        await asyncio.to_thread(self._keep, self._queue(queue), who, ids)

    async def settle(self, queue: str, ids: Collection[str], then: Posting | None = None) -> None:
        if then:
            await self.post(then)
        await asyncio.to_thread(self._append, queue, _line("settle", list(ids)))

    async def unsettled(self, queue: str) -> set[str]:
        def look(one: _Queue) -> set[str]:
            with one.file.locked():
                return one.catch_up(self._clock()).keys

        return await asyncio.to_thread(look, self._queue(queue))

    async def pin(self, name: str, body: bytes) -> None:
        await asyncio.to_thread(replace_file, self._directory / "board" / name, body)

    async def newer(self, name: str, than: str = "", wait: float = 0.0) -> Notice | None:
        def look() -> Notice | None:
            try:
                body = (self._directory / "board" / name).read_bytes()
            except FileNotFoundError:
                return None
            number = hashlib.blake2b(body, digest_size=8).hexdigest()
            return Notice(number, body) if number != than else None

        return await self._until(look, wait)

    async def sign(self, who: str, body: bytes) -> None:
        def write() -> None:
            with self._signing:  # one that was cancelled may still be writing
                replace_file(self._directory / "list" / who, body)

        await asyncio.to_thread(write)

    async def signed(self) -> Mapping[str, bytes]:
        def look() -> dict[str, bytes]:
            found = {}
            for path in self._entries():
                with contextlib.suppress(FileNotFoundError):
                    found[path.name] = path.read_bytes()
            return found

        return await asyncio.to_thread(look)

    async def unsign(self, who: str) -> None:
        (self._directory / "list" / who).unlink(missing_ok=True)

    async def wipe(self) -> None:
        for path in self._directory.glob("*.jsonl"):
            file = LineFile(path)
            with file.locked():
                file.replace([])
        for path in self._entries():
            path.unlink(missing_ok=True)
        (self._directory / LIVE).unlink(missing_ok=True)

    async def close(self) -> None:
        """Does nothing: no file is open between two calls."""

    def _entries(self) -> list[Path]:
        """The files of those who are there, without those that are being written: whoever writes one still needs it."""
        return [path for path in (self._directory / "list").iterdir() if not path.name.startswith(".")]

    def _queue(self, name: str) -> _Queue:
        if name not in self._queues:
            self._queues[name] = _Queue(self._directory / f"{name}.jsonl", self._lease)
        return self._queues[name]

    def _append(self, queue: str, line: bytes) -> None:
        file = LineFile(self._directory / f"{queue}.jsonl")
        with file.locked():
            file.append([line])

    def _claim(self, queue: _Queue, who: str, most: int) -> list[Letter]:
        with queue.file.locked():
            now = self._clock()
            letters = queue.catch_up(now).free(who, most, now, queue.given)
            if letters:
                ids = [letter.id for letter in letters]
                queue.file.append([_line("hold", who, ids)])
                queue.box.hold(ids, who, now)
                queue.given.update(ids)
            queue.shorten()
        return letters

    def _keep(self, queue: _Queue, who: str, ids: Collection[str]) -> None:
        with queue.file.locked():
            if ours := queue.catch_up(self._clock()).kept(ids, who):
                queue.file.append([_line("hold", who, ours)])

    async def _until(self, look: Callable[[], T], wait: float) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            if (found := await asyncio.to_thread(look)) or loop.time() >= until:
                return found
            await asyncio.sleep(self._poll)


def runs_in(directory: Path) -> list[str]:
    """Returns the runs that have a directory there, by name."""
    return sorted(path.parent.name for path in directory.glob(f"*/{LIVE}"))


def _letter(posting: Posting) -> Letter:
    return Letter(secrets.token_hex(8), posting.key, posting.body)


def _post(letter: Letter) -> bytes:
    return _line("post", letter.id, letter.key, base64.b64encode(letter.body).decode())


def _line(*fields: Any) -> bytes:
    return msgspec.json.encode(fields)
