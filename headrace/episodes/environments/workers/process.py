"""One process that plays environments, as the controller sees it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.errors import RolloutFailed
from headrace.core.protocols import Resumes
from headrace.core.types import Struct
from headrace.episodes.environments.workers.episode_frames import (
    LARGEST,
    Beat,
    Cancel,
    ChatAsked,
    ChatReply,
    FromController,
    FromProcess,
    FunctionLoaded,
    Play,
    ResumedTurn,
    Rewarded,
    RolloutDone,
    ToolAnswered,
    decode_report,
    pack,
)
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.sandbox.sandbox_limits import DEFAULT
from headrace.processes.asked_process import OWN_SITE, AskedProcess, Site, SiteLost
from headrace.processes.frames import receive_frame

SILENT = 30.0
"""Seconds in which it could run after which a process that sends no beat is killed: something holds the interpreter's lock."""
GRACE = 10.0
"""Seconds that the user's `finally` blocks may take after a rollout was cancelled."""

MODULE = "headrace.episodes.environments.workers.environment_worker"


class FunctionSettings(Struct, frozen=True, kw_only=True):
    """The settings that a process is started with."""

    spec: str
    """The user's function, `path/to/file.py:name`, or the function that opens environments of a library, `module:name`."""
    what: str
    """The setting that names it, for messages."""
    library: LibrarySettings | None
    """The settings of the library's environments; None for a function of the user."""
    seconds: float
    """The time that a rollout may take between its turns; 0 sets no limit."""
    tool_seconds: float
    tool_characters: int
    memory: int
    """Bytes of memory; 0 sets no limit."""
    sandbox: str = DEFAULT.as_text()
    """The settings of the sandbox (`SandboxSettings`)."""
    resumes: Resumes = "replayed"
    """How rollouts go on after a kill."""

    def arguments(self, check: bool = False) -> list[str]:
        rest = {
            "seconds": self.tool_seconds,
            "characters": self.tool_characters,
            "memory": self.memory,
            "check": check,
            "sandbox": self.sandbox,
            "resumes": self.resumes,
            "library": msgspec.to_builtins(self.library),
        }
        return [self.spec, json.dumps(rest)]


class RolloutAsked(Struct, frozen=True):
    """A rollout that is to be played."""

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    seed: int
    resumed: ResumedTurn | None = None
    """The turn in which it goes on; None if it begins."""


class RolloutListener(Protocol):
    """The part of the controller that answers a rollout while it is played."""

    async def chat(self, asked: ChatAsked) -> ChatReply:
        """Raises what ends the rollout."""

    def rewarded(self, given: Rewarded) -> None: ...

    def answered(self, given: ToolAnswered) -> None: ...


class Lost(Exception):
    """The process has ended while it played a rollout."""

    def __init__(self, how: str, blamed: bool | None) -> None:
        """`blamed`: whether this rollout is known to have ended it; None if nobody is."""
        super().__init__(how)
        self.how, self.blamed = how, blamed


class EnvironmentProcess(AskedProcess[FromController, FromProcess]):
    begins = "load", "the environment"

    def __init__(self, settings: FunctionSettings, log: Path | None, site: Site = OWN_SITE) -> None:
        super().__init__("environment", [MODULE, *settings.arguments()], log, site=site)
        self.silent, self._settings = SILENT, settings
        self._ids: Iterator[int] = itertools.count()
        self._heard: dict[int, asyncio.Queue[FromProcess | None]] = {}
        """The frames of each rollout; None: the process has ended."""
        self._blamed = -1
        self.left = 0
        """Threads of tools that hang in it."""

    @property
    def playing(self) -> int:
        """Number of rollouts."""
        return len(self._heard)

    def pack(self, order: FromController) -> bytes:
        return pack(order)

    async def receive(self) -> FromProcess:
        return decode_report(await receive_frame(self.reports, LARGEST))

    def accept(self, first: FromProcess) -> str:
        assert isinstance(first, FunctionLoaded)
        return first.error and f"could not load the environment a second time: {first.error}"

    async def play(self, asked: RolloutAsked, listener: RolloutListener) -> RolloutDone:
        """Plays one rollout. Raises `Lost` if the process ends before it does, `RolloutFailed` if it takes too long, and what the
        listener raises. When it is cancelled, the user's `finally` blocks run behind it."""
        id = next(self._ids)
        heard = self._heard[id] = asyncio.Queue()
        over, left = False, self._settings.seconds
        try:
            self.send(Play(id, asked.prompt, asked.columns, asked.seed, asked.resumed))
            while True:
                frame, left = await self._next(heard, left)
                match frame:
                    case None:
                        over = True
                        raise Lost(self.why, self._blames(id))
                    case ChatAsked():
                        self.send(await self._answered(frame, listener))
                    case Rewarded():
                        listener.rewarded(frame)
                    case ToolAnswered():
                        listener.answered(frame)
                    case RolloutDone():
                        over = True
                        self.left += frame.leaves
                        return frame
        finally:
            if over or not self.alive:
                del self._heard[id]
            else:
                self._part(id, heard)

    async def _next(self, heard: asyncio.Queue[FromProcess | None], left: float) -> tuple[FromProcess | None, float]:
        """Returns the next frame, and how many of the seconds that were left the rollout has not used for it."""
        if not self._settings.seconds:
            return await heard.get(), 0.0
        clock = asyncio.get_running_loop().time
        since = clock()
        try:
            frame = await self.within(left, heard.get())
        except TimeoutError:
            limit = f"took more than {self._settings.seconds:g} s between its turns (environment.seconds)"
            raise RolloutFailed("environment_timeout", limit) from None
        return frame, max(left - (clock() - since), 1e-3)

    async def _answered(self, asked: ChatAsked, listener: RolloutListener) -> ChatReply:
        reply = await listener.chat(asked)
        return ChatReply(
            id=asked.id,
            text=reply.text,
            calls=reply.calls,
            stop=reply.stop,
            tokens=reply.tokens,
            over=reply.over,
            refused=reply.refused,
        )

    def _part(self, id: int, heard: asyncio.Queue[FromProcess | None]) -> None:
        """Cancels a rollout, and kills the process if it does not end."""
        self.send(Cancel(id))
        self.finish(self._parted(id, heard))

    async def _parted(self, id: int, heard: asyncio.Queue[FromProcess | None]) -> None:
        async def ended() -> None:
            while not isinstance(frame := await heard.get(), RolloutDone | None):
                pass
            self.left += frame.leaves if isinstance(frame, RolloutDone) else 0

        try:
            await self.within(GRACE, ended())
        except TimeoutError:
            self._lose(id, "was killed, because a rollout that was over did not end")
        del self._heard[id]

    def obey(self, report: FromProcess) -> None:
        match report:
            case Beat(blocked_by=id) if id >= 0:
                self._lose(id, "was killed, because an async function kept its event loop from running")
            case ChatAsked(id=id) | Rewarded(id=id) | ToolAnswered(id=id) | RolloutDone(id=id):
                if id in self._heard:
                    self._heard[id].put_nowait(report)

    def forsake(self) -> None:
        for heard in self._heard.values():
            heard.put_nowait(None)

    def _blames(self, id: int) -> bool | None:
        """Whether the rollout has ended it; None if nobody is known to have. Nobody has where its machine is lost."""
        if isinstance(self.how_lost(), SiteLost):
            return False
        return None if self._blamed < 0 else self._blamed == id

    def _lose(self, id: int, why: str) -> None:
        self._blamed = id if self.alive else self._blamed
        self.kill(why)
