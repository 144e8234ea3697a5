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
import fcntl
import hashlib
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.durable.atomic_files import AppendFile, replace_file, sync_to_disk
from headrace.run.hosts.bus.bus_port import LEASE, Letter, Notice, Posting

# --- One queue as a value
# Which letters are in it, and who holds them. It knows no clock and no disk; `memory_bus.py` and `directory_bus.py` use it.


class Held(NamedTuple):
    who: str
    since: float
    """The time at which this process last heard from the holder, on its own clock: the clocks of several machines are never compared."""


class LetterBox:
    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._letters: dict[str, Letter] = {}
        """Ordered as they were posted."""
        self._holders: dict[str, Held] = {}

    def post(self, letter: Letter) -> None:
        """A letter whose id is known is the same letter."""
        self._letters.setdefault(letter.id, letter)

    def free(self, who: str, most: int, now: float, given: Collection[str]) -> list[Letter]:
        """Returns the letters that `who` may claim. `given`: the ids of those that this process of `who` has claimed before."""
        found = (letter for letter in self._letters.values() if self._is_free(letter.id, who, now, given))
        return [letter for letter, _ in zip(found, range(most), strict=False)]

    def hold(self, ids: Collection[str], who: str, now: float) -> None:
        for name in ids:
            if name in self._letters:
                self._holders[name] = Held(who, now)

    def kept(self, ids: Collection[str], who: str) -> list[str]:
        """Returns the letters of `ids` that `who` still holds."""
        return [name for name in ids if (held := self._holders.get(name)) and held.who == who]

    def settle(self, ids: Collection[str]) -> None:
        for name in ids:
            self._letters.pop(name, None)
            self._holders.pop(name, None)

    @property
    def keys(self) -> set[str]:
        return {letter.key for letter in self._letters.values()}

    @property
    def letters(self) -> Iterator[tuple[Letter, str]]:
        """Every letter with its holder, who is empty if nobody holds it."""
        for letter in self._letters.values():
            held = self._holders.get(letter.id)
            yield letter, held.who if held else ""

    def _is_free(self, letter_id: str, who: str, now: float, given: Collection[str]) -> bool:
        held = self._holders.get(letter_id)
        if held is None or now - held.since >= self._lease:
            return True
        return held.who == who and letter_id not in given


# --- A file of lines to which processes of several machines append, one at a time.
#
# Each line begins with a checksum and is flushed to the disk before the lock is released. A process that is killed while it writes leaves
# half a line: the next one that writes cuts it off. A line in the middle whose checksum is wrong (a page that a loss of power took) is
# left out and counted.


class NewLines(NamedTuple):
    lines: list[bytes]
    anew: bool
    """Whether they begin at the start of the file: it was replaced, or is read for the first time."""


class LineFile:
    """All methods but `locked` are called while the lock is held."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, path.with_suffix(".lock")
        self._head, self._read = b"", 0
        """The first line of the file that was read last, and the number of its bytes that were read."""
        self.damaged = 0
        """Lines that were left out."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock among all machines that share the directory (`flock`, which NFS passes on). The kernel frees the lock of a process
        that dies."""
        handle = os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def new(self) -> NewLines:
        """Returns the whole lines since the last call."""
        try:
            with self._path.open("rb") as file:
                if anew := (head := file.readline()) != self._head:
                    self._head, self._read = head, len(head)
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return NewLines([], False)
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.splitlines()
        sound = [line[9:] for line in lines if _checked(line[9:]) == line + b"\n"]
        self.damaged += len(lines) - len(sound)
        return NewLines(sound, anew)

    def append(self, lines: Sequence[bytes]) -> None:
        """Returns when the lines are on the disk. Raises HeadraceError."""
        is_new = not self._path.exists()
        file = AppendFile(self._path)  # cuts half a line off
        try:
            file.append((b"" if self._path.stat().st_size else _head()) + b"".join(map(_checked, lines)))
            file.flush()
        finally:
            file.close()
        if is_new:
            sync_to_disk(self._path.parent)

    def replace(self, lines: Sequence[bytes]) -> None:
        """Replaces the content of the file. Others notice by the first line."""
        replace_file(self._path, _head() + b"".join(map(_checked, lines)))

    @property
    def read(self) -> int:
        """Bytes of the file that were read."""
        return self._read


def _checked(line: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(line), line)


def _head() -> bytes:
    """A first line that no other file has: inodes are used again."""
    return b"%s\n" % secrets.token_hex(8).encode()


# --- jsonl ------------------------------------------------------------


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
        def look(queue_file: _Queue) -> set[str]:
            with queue_file.file.locked():
                return queue_file.catch_up(self._clock()).keys

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
