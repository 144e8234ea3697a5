"""The processes of a run's environments: many rollouts in each, and one alone where it may have ended the process of others.

A crash ends a process with all rollouts in it, and does not say which of them caused it. So each is played again, alone in a process:
the turns that were sampled are asked for again under the same names, so that they cost nothing. The one that ends its process
again has failed, and the others have lost time only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.core.errors import ConfigError, RolloutFailed
from headrace.episodes.environments.workers.episode_frames import LARGEST, FunctionLoaded, RolloutDone, decode_report
from headrace.episodes.environments.workers.process import (
    MODULE,
    EnvironmentProcess,
    FunctionSettings,
    Lost,
    RolloutAsked,
    RolloutListener,
)
from headrace.processes.asked_process import HERE, ProcessLost, Site, SiteLost, Sites, first_report

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
