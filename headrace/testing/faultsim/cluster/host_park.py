"""The rollout hosts of a simulated cluster, one for each engine, kept by a supervisor on its node."""

from __future__ import annotations

import asyncio
import itertools
import math

from headrace.core.errors import HeadraceError
from headrace.core.protocols import Job
from headrace.episodes.environments.single_turn import SINGLE_TURN
from headrace.facts.facts import Fact
from headrace.loop.assembly import groups_alone
from headrace.loop.loop_plan import LoopPlan
from headrace.loop.partial import PartialConfig
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.hosts.rollout_host import HostParts, RolloutHost
from headrace.run.worker.worker_messages import EngineStart
from headrace.settings.process_config import EvalConfig
from headrace.testing.faultsim.cluster.cluster_parts import ClusterProcesses, scorer_of, telemetry_of
from headrace.testing.faultsim.cluster.day_checks import DayChecks
from headrace.testing.faultsim.cluster.linked_bus import LinkedBus
from headrace.testing.faultsim.cluster.machines import Machines
from headrace.testing.faultsim.cluster.sizing import ClusterSize
from headrace.testing.memory_bus import MemoryBus, MemoryServer


class _Unheard:
    """The observer of a host: it reports to nobody but its terminal."""

    def record(self, fact: Fact) -> None:
        pass


class HostPark:
    def __init__(
        self, size: ClusterSize, machines: Machines, checks: DayChecks, server: MemoryServer, seed: int
    ) -> None:
        self._size, self._machines, self._checks, self._server, self._seed = size, machines, checks, server, seed
        self._numbers = itertools.count()
        self._there: dict[str, asyncio.Task[None]] = {}
        """The hosts that run, by seat."""
        self._scorer = scorer_of(size, seed)
        self.processes: ClusterProcesses
        """The processes of the run's newest process. A host opens its engine anew for each of them."""

    def open(self, processes: ClusterProcesses) -> list[asyncio.Task[None]]:
        """Returns the supervisors."""
        self.processes = processes
        return [asyncio.ensure_future(self._keep(f"engine {i}")) for i in range(self._size.engines)]

    def vanish(self, seat: str) -> None:
        """The host is gone with its node, whose link is cut."""
        if running := self._there.pop(seat, None):
            running.cancel()

    async def _keep(self, seat: str) -> None:
        """Starts the host again whenever it has ended."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._machines.seconds_until_free(seat, loop.time()))
            bus = LinkedBus(MemoryBus(self._server), self._machines.link(seat))
            host = RolloutHost(bus, f"{seat}.{next(self._numbers)}", lambda notice: self._parts(seat))
            running = self._there[seat] = asyncio.ensure_future(host.run())
            self._checks.serve(loop.time(), len(self._there))
            await asyncio.wait([running])
            if self._there.get(seat) is running:
                del self._there[seat]
            self._checks.serve(loop.time(), len(self._there))
            if not running.cancelled() and (error := running.exception()):
                assert isinstance(error, HeadraceError), f"C6: a host ended with {error!r}"
                self._checks.said.append(f"{loop.time() / 3600:5.2f} h  {seat}: {error}")
                self._checks.deaths += 1
            await asyncio.sleep(self._size.restart)

    async def _parts(self, seat: str) -> HostParts:
        size, telemetry = self._size, telemetry_of(self._size, _Unheard())
        engine = ProcessEngine(self.processes.launcher, Job("engine", seat), 3, telemetry)
        await engine.launch()
        await engine.open(EngineStart("", {}, {}))
        groups = groups_alone(
            plan=_plan(size, self._seed),
            engine=engine,
            partial=PartialConfig(),
            environment=SINGLE_TURN,
            scorer=self._scorer,
            evaluated_by=self._scorer,
            evaluation=EvalConfig(samples=1),
            decode=lambda tokens: "",
            telemetry=telemetry,
        )
        return HostParts(
            engine=engine,
            interrupts=groups.interrupts,
            groups=groups,
            adapter="",
            share=lambda hosts: math.ceil(size.staleness.generating / hosts),
            close=engine.close,
            waits=telemetry.waits,
        )


def _plan(size: ClusterSize, seed: int) -> LoopPlan:
    return LoopPlan(
        steps=1,
        staleness=size.staleness,
        rollout=size.rollout,
        seed=seed,
        max_skipped_steps=3,
        checkpoint_every=0,
        evaluate_every=0,
    )
