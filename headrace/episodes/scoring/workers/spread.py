"""Calls of reward functions on several machines: each goes to the one that has the least in hand, and to another one if that is lost."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence

from headrace.episodes.scoring.job import ScoringJob, Values, fail_all
from headrace.episodes.scoring.workers.processes import PrivatePool, SharedProcess, WorkerProcess
from headrace.processes.asked_process import Site, SiteLost, Sites

LIVES = 3
"""How often a call is made at most, where the machine is lost that it is made on: the function may be what ends it."""


class SpreadPool:
    """A pool on each machine."""

    def __init__(
        self, sites: Sites, make: Callable[[Site], PrivatePool | SharedProcess], width: float = math.inf
    ) -> None:
        """`width`: calls that one machine is given at once; others wait for a turn on any of them."""
        self._sites, self._width = sites, width
        self._pools = {site: make(site) for site in sites.every}
        self._in_hand: Counter[Site] = Counter()
        self._turn = asyncio.Event()
        """Set whenever there may be a turn: a call has ended, a machine has come up."""
        sites.listen(self._turn.set)

    def adopt(self, worker: WorkerProcess) -> None:
        """Takes over a process of this machine that has these functions."""
        self._pools[worker.site].adopt(worker)

    @property
    def pids(self) -> Sequence[int]:
        return [pid for pool in self._pools.values() for pid in pool.pids]

    async def call(self, function: int, job: ScoringJob) -> Values:
        how = ""
        for _ in range(LIVES):
            site = await self._take()
            try:
                return await self._pools[site].call(function, job)
            except SiteLost as lost:
                how = str(lost)
            finally:
                self._in_hand[site] -= 1
                self._turn.set()
        return fail_all(
            job, "reward_worker_died", f"{LIVES} processes that ran it were lost with their machines; the last {how}"
        )

    async def _take(self) -> Site:
        while True:
            self._turn.clear()
            site = await self._sites.least(self._in_hand.__getitem__)
            if self._in_hand[site] < self._width:
                self._in_hand[site] += 1
                return site
            await self._turn.wait()

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
