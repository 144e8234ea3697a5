"""The door of a running run: a socket in its directory, through which a person sees the members of its fleet and changes them.

One line of JSON asks and one answers. The socket is open to the user alone who started the run, like the files beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.types import Struct
from headrace.durable.atomic_files import replace_file
from headrace.engine.fleet.fleet import Fleet, samples
from headrace.engine.fleet.member import MemberEngine
from headrace.facts.facts import MemberSample

# --- `pool.json`
# The servers of a run after a person has added or removed some. A resumed run goes on with them.


FILE = "pool.json"


class Roster(Struct, frozen=True):
    """The content of the file."""

    settings: tuple[str, ...]
    """`engine.urls` when it was written. A resume with other ones means those, and ignores the file."""
    urls: tuple[str, ...]
    """The servers since."""


def urls_of(run_dir: Path, settings: Sequence[str]) -> tuple[str, ...]:
    """Returns the servers that a run starts with. `settings`: its `engine.urls`."""
    try:
        roster = msgspec.json.decode((run_dir / FILE).read_bytes(), type=Roster)
    except (OSError, msgspec.MsgspecError):
        return tuple(settings)
    return roster.urls if roster.settings == tuple(settings) and roster.urls else tuple(settings)


def keep(run_dir: Path, settings: Sequence[str], urls: Sequence[str]) -> None:
    replace_file(run_dir / FILE, msgspec.json.encode(Roster(tuple(settings), tuple(urls))))


# --- pool door ------------------------------------------------------------


SOCKET = "pool.sock"
LONGEST, SECONDS = 4096, 10.0
"""Largest size of a question in bytes, and the time within which it has to arrive."""

Join = Callable[[str], Awaitable[MemberEngine]]
"""Connects to the server at an address. Raises HeadraceError where it does not come, or does not go with the run."""


class PoolQuestion(Struct, frozen=True):
    do: Literal["show", "add", "remove"]
    member: str = ""


class PoolAnswer(Struct, frozen=True):
    members: tuple[MemberSample, ...] = ()
    error: str = ""


class PoolDoor:
    def __init__(self, run_dir: Path, fleet: Fleet, join: Join | None, settings: Sequence[str]) -> None:
        """`join`: None for engines on this machine. `settings`: the run's `engine.urls`."""
        self._run_dir, self._fleet, self._join, self._settings = run_dir, fleet, join, tuple(settings)
        self._server: asyncio.Server | None = None
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Raises OSError where no socket can be made in the run's directory."""
        with _short(self._run_dir) as place:
            with contextlib.suppress(FileNotFoundError):  # of a process that was killed; the run's lock is ours
                os.unlink(place)
            listening = socket.socket(socket.AF_UNIX)
            try:
                listening.bind(place)
                os.chmod(place, 0o600)
            except OSError:
                listening.close()
                raise
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=LONGEST)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            (self._run_dir / SOCKET).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                question = await reader.readline()
            answer = await self._answer(question)
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()
        except (OSError, ValueError):  # whoever asked has gone, or sends without end
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> PoolAnswer:
        try:
            question = msgspec.json.decode(line, type=PoolQuestion)
            async with self._changing:
                await self._obey(question)
        except (HeadraceError, msgspec.MsgspecError) as error:
            return PoolAnswer(samples(self._fleet.members), str(error))
        return PoolAnswer(samples(self._fleet.members))

    async def _obey(self, question: PoolQuestion) -> None:
        name = question.member
        match question.do:
            case "add":
                await self._add(name.rstrip("/"))
            case "remove":
                await self._fleet.remove(name if name in self._names() else name.rstrip("/"))
                self._keep()

    async def _add(self, url: str) -> None:
        if self._join is None:
            raise ConfigError(
                "the members of this run are processes on this machine, one for each of engine.replicas; stop the run and resume it with "
                "another number"
            )
        if url in self._names():
            raise ConfigError(f"{url} is a member already")
        part = await self._join(url)
        self._fleet.add(url, part)
        self._keep()

    def _names(self) -> list[str]:
        return [member.name for member in self._fleet.members]

    def _keep(self) -> None:
        if self._join is not None:
            keep(self._run_dir, self._settings, self._names())


def ask(run_dir: Path, question: PoolQuestion, seconds: float) -> PoolAnswer:
    """Asks a running run. Raises ConfigError where it has no fleet or does not run, HeadraceError without an answer."""
    with _short(run_dir) as place, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(place)
        except OSError as error:
            raise ConfigError(
                f"{run_dir} does not answer ({error.strerror or error}): it does not run, or has one engine"
            ) from None
        try:
            connection.sendall(msgspec.json.encode(question) + b"\n")
            line = connection.makefile("rb").readline()
        except TimeoutError:
            raise HeadraceError(
                f"{run_dir} has not answered for {seconds:g} s; headrace status {run_dir} shows what it waits for"
            ) from None
    if not line.endswith(b"\n"):
        raise HeadraceError(f"{run_dir} ended before it answered")
    return msgspec.json.decode(line, type=PoolAnswer)


@contextlib.contextmanager
def _short(run_dir: Path) -> Iterator[str]:
    """A short name of the socket: the kernel takes 107 bytes, and directories may have longer paths."""
    if not Path("/proc/self/fd").is_dir():
        yield str(run_dir / SOCKET)
        return
    handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)
