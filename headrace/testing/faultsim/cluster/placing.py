"""The launcher of a simulated cluster: a worker starts when the hardware of its seat is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.protocols import Heard, Job
from headrace.testing.fake_worker import FakeWorker
from headrace.testing.faultsim.cluster.cluster_engine import ClusterEngineProcess
from headrace.testing.faultsim.cluster.cluster_trainer import ClusterRankProcess
from headrace.testing.faultsim.cluster.machines import Machines, NodeLink
from headrace.testing.faultsim.cluster.sizing import ClusterSize

ClusterProcess = ClusterEngineProcess | ClusterRankProcess

Begin = Callable[[str, NodeLink], ClusterProcess]
"""Begins the process of a seat."""


class ClusterLauncher:
    """Protocol `Launcher`."""

    def __init__(self, size: ClusterSize, machines: Machines, begin: Begin) -> None:
        self.size, self.machines, self._begin = size, machines, begin
        self.processes: dict[str, ClusterProcess] = {}
        """The newest process of each seat."""

    def worker(self, job: Job, heard: Heard) -> ClusterWorker:
        return ClusterWorker(job, heard, self)

    def begin(self, seat: str) -> ClusterProcess:
        process = self.processes[seat] = self._begin(seat, self.machines.link(seat))
        return process


class ClusterWorker(FakeWorker):
    """Protocol `Worker`."""

    def __init__(self, job: Job, heard: Heard, launcher: ClusterLauncher) -> None:
        size = launcher.size
        self._boot = size.engine_boot if job.kind == "engine" else size.trainer_boot
        silence = size.beats if job.kind == "engine" else None
        link = launcher.machines.link(job.who)
        super().__init__(job.who, lambda: launcher.begin(job.who), heard, link, silence)
        self._launcher = launcher

    async def start(self) -> None:
        loop, machines = asyncio.get_running_loop(), self._launcher.machines
        await asyncio.sleep(machines.seconds_until_free(self.who, loop.time()))
        self._network = machines.link(self.who)
        await asyncio.sleep(self._boot)
        await super().start()
