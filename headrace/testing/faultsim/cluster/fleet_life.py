"""One process of the controller over a fleet, from its start to its end, its kill or an error."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.core.protocols import Job
from headrace.engine.fleet.fleet import Fleet
from headrace.engine.fleet.rotation import FleetPatience
from headrace.facts.facts import Accounting, EngineSample, Fact
from headrace.facts.telemetry import Telemetry
from headrace.loop.world.world import World
from headrace.run.clients.process_engine import ProcessEngine
from headrace.run.worker.worker_messages import EngineStart
from headrace.testing.faultsim.cluster.cluster_parts import ClusterProcesses, telemetry_of, world_settings
from headrace.testing.faultsim.cluster.day_checks import DayChecks
from headrace.testing.faultsim.cluster.machines import Machines
from headrace.testing.faultsim.cluster.mishaps import Mishap
from headrace.testing.faultsim.cluster.sizing import ClusterSize

NOBODY = 3600.0
"""Seconds for which the fleet may be without any member: all of them start anew after a failure of the whole network."""


class FleetLife:
    def __init__(
        self, size: ClusterSize, machines: Machines, checks: DayChecks, *, directory: Path, seed: int, until: float
    ) -> None:
        """`until`: the time at which the run is interrupted."""
        self._size, self._checks = size, checks
        self._directory, self._seed, self._until = directory, seed, until
        self._processes = ClusterProcesses(size, machines)
        self._world: World | None = None
        self.up_at = float("inf")
        """The time at which the run went on."""

    @property
    def books(self) -> Accounting:
        assert self._world
        return self._world.buffer.accounting(in_checkpoint=True)

    async def run(self) -> None:
        size, loop, processes = self._size, asyncio.get_running_loop(), self._processes
        telemetry = telemetry_of(size, self._checks)
        trainer = processes.trainer(self._directory)
        parts = {str(i): self._engine(f"engine {i}", telemetry) for i in range(size.engines)}
        fleet = Fleet(parts, FleetPatience(NOBODY, size.silence, every=5 * size.silence), telemetry)
        try:
            await asyncio.gather(trainer.open(), *map(_up, parts.values()))
            await fleet.open()
            self._checks.begins(loop.time(), len(fleet.members))
            world = self._world = World(
                self._directory,
                size.staleness,
                engine=fleet,
                trainer=trainer,
                **world_settings(size, self._seed, self._checks),  # type: ignore[arg-type]
            )
            loop.call_at(max(self._until, loop.time()), lambda: world.pipeline.interrupt())
            self.up_at = loop.time()
            await world.run(resume=self._directory.exists())
        finally:
            await fleet.close()
            await trainer.close()

    def befall(self, mishap: Mishap) -> None:
        self._processes.befall(mishap)

    def _engine(self, seat: str, telemetry: Telemetry) -> ProcessEngine:
        def record(fact: Fact) -> None:
            if not isinstance(fact, EngineSample):  # as in a real fleet, which records its own
                telemetry.record(fact)

        member = Telemetry(record, telemetry.clock, telemetry.waits)
        return ProcessEngine(self._processes.launcher, Job("engine", seat), 3, member)


async def _up(part: ProcessEngine) -> None:
    await part.launch()
    await part.open(EngineStart("", {}, {}))
