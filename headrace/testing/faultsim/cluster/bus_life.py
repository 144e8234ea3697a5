"""The simulated cluster over a bus: every engine belongs to a rollout host of its own, and the run has none.

Run, bus and hosts share one loop. A host looks at the bus every second, so that an hour of two hundred hosts takes as long as a day of a fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.facts.facts import Accounting
from headrace.loop.own_groups import Suspects
from headrace.loop.world.world import World
from headrace.run.clients.bus_engine import BusEngine
from headrace.run.hosts.bus.bus_port import Bus
from headrace.run.hosts.bus_messages import GroupSizes, RunNotice
from headrace.testing.faultsim.cluster.cluster_parts import ClusterProcesses, telemetry_of, world_settings
from headrace.testing.faultsim.cluster.day_checks import DayChecks
from headrace.testing.faultsim.cluster.host_park import HostPark
from headrace.testing.faultsim.cluster.machines import Machines
from headrace.testing.faultsim.cluster.mishaps import Mishap
from headrace.testing.faultsim.cluster.sizing import ClusterSize
from headrace.testing.faultsim.faults import Killed
from headrace.testing.memory_bus import MemoryBus, MemoryServer
from headrace.version import __version__


class BusLives:
    """All processes of a run, and the hosts, which outlast them."""

    def __init__(
        self, size: ClusterSize, machines: Machines, checks: DayChecks, *, directory: Path, seed: int, until: float
    ) -> None:
        self._size, self._machines, self._checks = size, machines, checks
        self._directory, self._seed, self._until = directory, seed, until
        self._processes = ClusterProcesses(size, machines)
        self._world: World | None = None
        self._engine: BusEngine | None = None
        self._running: asyncio.Task[None] | None = None
        self.down = 0.0
        self.ends: list[str] = []

    @property
    def books(self) -> Accounting:
        assert self._world
        return self._world.buffer.accounting(in_checkpoint=True)

    async def run(self, mishaps: Sequence[Mishap]) -> None:
        size, loop = self._size, asyncio.get_running_loop()
        server = MemoryServer()
        self._park = HostPark(size, self._machines, self._checks, server, self._seed)
        keepers = self._park.open(self._processes)
        for mishap in mishaps:
            loop.call_at(mishap.t, self._befall, mishap)
        try:
            while True:
                self._began = loop.time()
                self._running = asyncio.ensure_future(self._live(MemoryBus(server)))
                await asyncio.wait([self._running])
                if not (reason := self._reason()):
                    return
                self.ends.append(f"{loop.time() / 3600:.2f} h: {reason}")
                assert len(self.ends) <= len(mishaps), f"C6: the run does not go on: {self.ends[-1]}"
                await asyncio.sleep(size.restart)
                self._processes = self._park.processes = ClusterProcesses(size, self._machines)
                self.down += size.restart
        finally:
            for keeper in keepers:
                keeper.cancel()

    def _reason(self) -> str:
        """The reason for which the newest process ended before the day did; empty if it did not."""
        assert self._running
        if self._running.cancelled():
            return "the controller was killed"
        error = self._running.exception()
        if error and not isinstance(error, HeadraceError):
            raise error
        return str(error).partition(". ")[0] if error else ""

    async def _live(self, bus: Bus) -> None:
        size, loop = self._size, asyncio.get_running_loop()
        telemetry = telemetry_of(size, self._checks)
        trainer = self._processes.trainer(self._directory)

        async def opened() -> tuple[Bus, str]:
            return bus, "in memory"

        sizes, suspects = GroupSizes(size.group_size, 1), Suspects(size.ticket_deaths)
        engine = self._engine = BusEngine("the bus", opened, "", telemetry, sizes=sizes, suspects=suspects)
        try:
            await engine.launch()
            await trainer.open()
            await engine.open(RunNotice("", __version__))
            self._checks.restarted()
            resume = self._directory.exists()
            world = self._world = World(
                self._directory,
                size.staleness,
                engine=engine,
                trainer=trainer,
                elsewhere=engine.groups,
                **world_settings(size, self._seed, self._checks),  # type: ignore[arg-type]
            )
            loop.call_at(max(self._until, loop.time()), lambda: world.pipeline.interrupt())
            self.down += loop.time() - self._began
            await world.run(resume=resume)
        except HeadraceError:
            await engine.close()
            raise
        else:
            await engine.close()
        finally:
            await trainer.close()

    def _befall(self, mishap: Mishap) -> None:
        try:
            gone = self._processes.befall(mishap)
        except Killed:
            self._kill()
            return
        for seat in gone:
            if seat.startswith("engine"):
                self._park.vanish(seat)

    def _kill(self) -> None:
        """Ends it as SIGKILL does: its hosts hear nothing of it."""
        if self._engine:
            self._engine.kill()
        if self._running:
            self._running.cancel()
