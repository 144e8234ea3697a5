"""The processes of a run's environments: many rollouts in each, and one alone where it may have ended the process of others.

A crash ends a process with all rollouts in it, and does not say which of them caused it. So each is played again, alone in a process:
the turns that were sampled are asked for again under the same names, so that they cost nothing. The one that ends its process
again has failed, and the others have lost time only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.core.errors import ConfigError, RolloutFailed
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
from headrace.processes.asked_process import (
    HERE,
    OWN_SITE,
    AskedProcess,
    ProcessLost,
    Site,
    SiteLost,
    Sites,
    first_report,
)
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


LIVES = 3
"""How often a rollout is played at most, where others end its process."""


def check_function(settings: FunctionSettings) -> FunctionLoaded:
    """Loads the function once in a process of its own, and returns what it is. Raises ConfigError if it cannot be loaded."""
    first = decode_report(first_report(MODULE, settings.arguments(check=True), settings.what, LARGEST))
    assert isinstance(first, FunctionLoaded)
    if first.error:
        raise ConfigError(first.error)
    return first


Beginning = tuple[RolloutAsked, RolloutListener]


class EnvironmentPool:
    def __init__(self, settings: FunctionSettings, workers: int, log: Path | None, sites: Sites = HERE) -> None:
        """`workers`: processes of each machine that are shared, and rollouts of all machines that are alone in further ones."""
        self._settings, self._width, self._log, self._sites = settings, workers, log, sites
        self._shared: list[EnvironmentProcess] = []
        self._retired: set[EnvironmentProcess] = set()
        """Shared ones with hanging threads, which get no more rollouts; and those of one rollout."""
        self._starting = asyncio.Lock()
        self._alone = asyncio.Semaphore(workers)

    async def play(self, begin: Callable[[], Awaitable[Beginning]]) -> RolloutDone:
        """Returns how the rollout ended. `begin`: says how it begins, and who answers it, for each time that it is played. Raises
        `RolloutFailed` if it ended its process, and what the listener raises."""
        alone = False
        for _ in range(LIVES):
            asked, listener = await begin()
            try:
                async with self._place(alone) as process:
                    ended = await process.play(asked, listener)
            except SiteLost:
                continue
            except ProcessLost as lost:  # it could not be started
                raise RolloutFailed("environment_died", f"its process {lost}") from None
            except Lost as lost:
                if lost.blamed or (alone and lost.blamed is None):
                    raise RolloutFailed("environment_died", f"its process {lost.how}") from None
                alone = lost.blamed is None
                continue
            if alone or not (ended.failure and ended.failure.reason == "environment_memory"):
                return ended
            alone = True  # another rollout may have taken the memory
        raise RolloutFailed(
            "environment_died", f"its process ended {LIVES} times, with other rollouts or with its machine"
        )

    @asynccontextmanager
    async def _place(self, alone: bool) -> AsyncIterator[EnvironmentProcess]:
        if not alone:
            process = await self._least_busy()
            try:
                yield process
            finally:
                await self._sort_out(process)
            return
        async with self._alone:
            process = EnvironmentProcess(self._settings, self._log, await self._sites.least(self._playing_on))
            self._retired.add(process)
            try:
                await process.start()
                yield process
            finally:
                await process.close()
                self._retired.discard(process)

    async def _least_busy(self) -> EnvironmentProcess:
        async with self._starting:
            self._shared = [candidate for candidate in self._shared if candidate.alive]
            site = await self._sites.least(self._shared_on)
            if self._shared_on(site) < self._width:
                process = EnvironmentProcess(self._settings, self._log, site)
                await process.start()
                self._shared.append(process)
            return min(self._shared, key=lambda candidate: candidate.playing)

    def _shared_on(self, site: Site) -> int:
        return sum(process.site is site for process in self._shared)

    def _playing_on(self, site: Site) -> int:
        return sum(process.playing for process in (*self._shared, *self._retired) if process.site is site)

    async def _sort_out(self, process: EnvironmentProcess) -> None:
        """Gives no more rollouts to a process in which threads of tools hang, and ends it when it has none left."""
        if process.left and process in self._shared:
            self._shared.remove(process)
            self._retired.add(process)
        if process in self._retired and not process.playing:
            self._retired.discard(process)
            await process.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the live processes."""
        return [process.pid for process in (*self._shared, *self._retired) if process.alive]

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in (*self._shared, *self._retired)))
        self._shared.clear()
        self._retired.clear()
