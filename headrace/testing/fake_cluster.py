"""A cluster whose nodes are in this process, for tests: with real workers on this machine, or in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headrace.processes.joining.greeting import SEAT, Agreed, Terms
from headrace.processes.joining.joined import ALONE, Team
from headrace.processes.placed.host import NodeHost
from headrace.processes.placed.placed import ClusterNode, HostLost, NodeShare
from headrace.processes.wire import BEAT
from headrace.testing.fake_arrivals import FakeArrivals
from headrace.testing.fake_worker import FakeProcess, InstantNetwork

NEVER = 1e9
"""Seconds that a message from or to a frozen node takes."""


class FakeMachine(InstantNetwork):
    """A node, and the network of its workers."""

    def __init__(self, number: int, has: NodeShare) -> None:
        self.node = ClusterNode(f"node {number}", f"10.0.0.{number}", has)
        self.hosts: list[FakeHosted] = []
        self.bundles: list[NodeShare] = []
        """Shares that are reserved here."""
        self.awake, self.frozen = asyncio.Event(), False
        self.awake.set()

    def seconds(self, scale: float) -> float:
        return NEVER if self.frozen else 0.0

    def fits(self, bundle: NodeShare, count: int) -> bool:
        has = self.node.has.amounts
        for taken in [*self.bundles, *[bundle] * count]:
            has = {name: count - taken.amounts.get(name, 0) for name, count in has.items()}
        return bundle.amounts.keys() <= has.keys() and all(count >= 0 for count in has.values())


class FakeHosted:
    """Protocol `Hosted`."""

    def __init__(self, host: Any, machine: FakeMachine) -> None:
        self._host, self._machine = host, machine
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ask(self, method: str, *values: Any) -> Any:
        await self._machine.awake.wait()
        answer = asyncio.ensure_future(getattr(self._host, method)(*values))
        try:
            await asyncio.wait([answer, self._gone], return_when=asyncio.FIRST_COMPLETED)
            await self._machine.awake.wait()
            if self._gone.done():
                raise HostLost(self._gone.result())
            return answer.result()
        finally:
            answer.cancel()

    def kill(self) -> None:
        self.end("its host was killed")

    def end(self, how: str) -> None:
        self._host.kill()
        if not self._gone.done():
            self._gone.set_result(how)


class FakeBerth:
    """Protocol `Berth`."""

    def __init__(self, cluster: FakeCluster, bundle: NodeShare, avoid: Collection[str]) -> None:
        self._cluster, self.bundle, self.avoid = cluster, bundle, avoid
        self.beside: Sequence[FakeBerth] = [self]
        """The berths that must be on its node, or itself."""
        self.machine: asyncio.Future[FakeMachine] = asyncio.get_running_loop().create_future()

    async def placed(self) -> ClusterNode:
        return (await asyncio.shield(self.machine)).node

    async def host(self) -> FakeHosted:
        machine = await asyncio.shield(self.machine)
        hosted = FakeHosted(self._cluster.begin(machine), machine)
        machine.hosts.append(hosted)
        return hosted

    async def release(self) -> None:
        self._cluster.give_back(self)


class FakeCluster:
    """Protocol `Cluster`. `begin`: makes the `NodeHost` of a node."""

    address, software, head, survives = "fake", "fake", "10.0.0.1:6379", 60.0
    own = "10.0.0.1"
    missing = ""
    """The reason why its head does not answer; empty if it does."""

    def __init__(
        self, nodes: Sequence[NodeShare], begin: Callable[[FakeMachine], Any] = lambda machine: NodeHost()
    ) -> None:
        self.begin = begin
        self.machines = {f"node {number}": FakeMachine(number, has) for number, has in enumerate(nodes, 1)}
        self._waiting: list[FakeBerth] = []
        self.doubts: dict[str, float] = {}

    async def open(self) -> None: ...

    async def head_problem(self) -> str:
        return self.missing

    async def nodes(self) -> Sequence[ClusterNode]:
        return [machine.node for machine in self.machines.values()]

    async def own_address(self) -> str:
        return self.own

    async def reserve(self, bundle: NodeShare, avoid: Collection[str] = (), team: Team = ALONE) -> Sequence[FakeBerth]:
        berths = [FakeBerth(self, bundle, avoid) for _ in range(team.size)]
        for berth in berths:
            berth.beside = berths if team.must else [berth]
        self._waiting += berths
        self._place()
        return berths

    async def visit(self, node: ClusterNode) -> FakeHosted:
        machine = self.machines[node.id]
        return FakeHosted(self.begin(machine), machine)

    async def aclose(self) -> None:
        for name in list(self.machines):
            self.remove(name)

    def _place(self) -> None:
        """Each in turn on the node with the fewest bundles; in the order in which they were asked for."""
        for first in list(self._waiting):
            team = first.beside if first is first.beside[0] else ()
            for machine in sorted(self.machines.values(), key=lambda machine: len(machine.bundles)):
                if machine.node.id not in first.avoid and machine.fits(first.bundle, len(team)):
                    for berth in team:
                        machine.bundles.append(berth.bundle)
                        berth.machine.set_result(machine)
                        self._waiting.remove(berth)
                    break

    def give_back(self, berth: FakeBerth) -> None:
        if berth in self._waiting:
            self._waiting.remove(berth)
        else:
            berth.machine.result().bundles.remove(berth.bundle)
        self._place()

    # -- what happens to nodes ------------------------------------------------------------------------------------------------

    def add(self, has: NodeShare) -> None:
        number = len(self.machines) + 1
        self.machines[f"node {number}"] = FakeMachine(number, has)
        self._place()

    def freeze(self, name: str) -> None:
        """Freezes a node: nothing comes from there any more, and the cluster does not notice it."""
        self.machines[name].frozen = True
        self.machines[name].awake.clear()

    def remove(self, name: str) -> None:
        machine = self.machines.pop(name)
        machine.awake.set()
        for hosted in machine.hosts:
            hosted.end("its node is gone")


class ScriptedHost:
    """A `NodeHost` in virtual time: its worker is a process of `begin`, which beats every second."""

    def __init__(
        self,
        machine: FakeMachine,
        arrivals: FakeArrivals,
        begin: Callable[[FakeMachine], FakeProcess],
        versions: Mapping[str, str],
        agreed: Agreed,
    ) -> None:
        self._machine, self._arrivals, self._begin = machine, arrivals, begin
        self._versions, self._agreed = versions, agreed
        self._process: FakeProcess | None = None

    async def look(self) -> Mapping[str, str]:
        return self._versions

    async def agree(self, terms: Terms) -> Agreed:
        return self._agreed

    async def start(self, kind: str, address: str, variables: Mapping[str, str]) -> int:
        self._process = process = self._begin(self._machine)
        self._arrivals.offer(process, self._machine.node.id, variables[SEAT])
        self._beating = asyncio.ensure_future(_beat(process))
        return 1

    async def output(self) -> tuple[bytes, int | None]:
        assert self._process
        await self._process.ended.wait()
        return self._process.how.encode(), 1

    def kill(self) -> None:
        if self._process:
            self._process.die("was killed by SIGKILL")


async def _beat(process: FakeProcess) -> None:
    while process.alive:
        process.push(BEAT, None)
        await asyncio.sleep(1.0)
