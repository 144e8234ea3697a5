"""The common parts of both kinds of a simulated cluster: processes by seat, the trainer, the world, and what mishaps do to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.core.protocols import Observer
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.checkpoints import Checkpoints
from headrace.loop.world.surroundings import SimulatedScorer, SimulatedTask, fixed
from headrace.loop.world.virtual_time import VirtualTimeLoop
from headrace.run.clients.process_trainer import ProcessTrainer
from headrace.testing.fake_worker import bare_start
from headrace.testing.faultsim.cluster.cluster_engine import ClusterEngineProcess
from headrace.testing.faultsim.cluster.cluster_trainer import ClusterRankProcess, MeshState
from headrace.testing.faultsim.cluster.machines import Machines, NodeLink
from headrace.testing.faultsim.cluster.mishaps import Mishap
from headrace.testing.faultsim.cluster.placing import ClusterLauncher, ClusterProcess
from headrace.testing.faultsim.cluster.sizing import ClusterSize
from headrace.testing.faultsim.faults import Killed

ENDLESS = 1_000_000
"""Steps of the run: the day ends first."""


class ClusterProcesses:
    """The processes of a cluster in one life of the controller, and their launcher."""

    def __init__(self, size: ClusterSize, machines: Machines) -> None:
        self._size, self._machines = size, machines
        self.mesh = MeshState()
        self.launcher = ClusterLauncher(size, machines, self._process)

    def _process(self, seat: str, link: NodeLink) -> ClusterProcess:
        if seat.startswith("engine"):
            return ClusterEngineProcess(link, self._size, self.mesh.published)
        return ClusterRankProcess(link, self._size, self.mesh, int(seat.rpartition(" ")[2]))

    def trainer(self, directory: Path) -> ProcessTrainer:
        """The trainer of a run, from its newest checkpoint."""
        newest, _ = Checkpoints(directory / "checkpoints", keep=2).newest_good()
        restore = {"": str(newest)} if newest else {}
        together = {"parallel": {"tensor": self._size.ranks}}  # rank 0, which answers, has all rows
        return ProcessTrainer(self.launcher, bare_start(restore=restore, ranks=self._size.ranks, train=together))

    def befall(self, mishap: Mishap) -> list[str]:
        """Makes it happen, whether or not the processes that it befalls are there. Returns the seats that are gone with their node."""
        machines, loop = self._machines, asyncio.get_running_loop()
        now, gone = loop.time(), list[str]()
        match mishap.kind:
            case "gpu_crashes" | "gpu_hangs" | "gpu_slows":
                self._gpu(mishap, machines.seat_of(mishap.at(self._size.gpus)), now)
            case "node_lost":
                node = mishap.at(machines.nodes)
                gone = machines.seats_on(node)
                machines.cut(node)
                machines.replace(gone, now)
                for seat in gone:
                    if process := self.launcher.processes.get(seat):
                        process.vanish()
            case "network_flap":
                for link in machines.rack(mishap.at(machines.racks)):
                    link.down_until = now + mishap.seconds
            case "slow_link":
                machines.link(f"engine {mishap.at(self._size.engines)}").slow_until = now + mishap.seconds
            case "message_repeated":
                machines.link(f"engine {mishap.at(self._size.engines)}").repeats += 1
            case "clock_jump":
                assert isinstance(loop, VirtualTimeLoop)
                loop.jump(mishap.seconds)
            case "controller_killed":
                raise Killed
        return gone

    def _gpu(self, mishap: Mishap, seat: str, now: float) -> None:
        process = self.launcher.processes.get(seat)
        shared = self.mesh if isinstance(process, ClusterRankProcess) else process
        if mishap.kind == "gpu_crashes":
            self._machines.replace([seat], now)
            if process:
                process.die("was killed by SIGABRT: its GPU has failed (simulated)")
        elif shared and mishap.kind == "gpu_hangs":
            shared.hangs = True
        elif shared:
            shared.slow_until = now + mishap.seconds


def telemetry_of(size: ClusterSize, observer: Observer) -> Telemetry:
    clock = asyncio.get_running_loop().time
    return Telemetry(observer.record, clock, Waits(observer.record, clock, size.stop_after / 2, size.stop_after))


def scorer_of(size: ClusterSize, seed: int) -> SimulatedScorer:
    return SimulatedScorer(latency=fixed(0), workers=1, seed=seed, contrast=size.contrast, overhead=size.reward)


def world_settings(size: ClusterSize, seed: int, observer: Observer) -> dict[str, object]:
    """The arguments of the world of a day, but for its directory, engine and trainer."""
    return {
        "task": SimulatedTask(fixed(size.prompt), seed),
        "scorer": scorer_of(size, seed),
        "observer": observer,
        "steps": ENDLESS,
        "seed": seed,
        "rollout": size.rollout,
        "decode": lambda tokens: "",
        "stop_after": size.stop_after,
        "checkpoint_every": size.checkpoint_every,
        "identity_every": size.checkpoint_every,
    }
