"""The port of a cluster that places workers: the few things that a run wants of Ray."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.core.errors import HeadraceError


class HostLost(HeadraceError):
    """A host does not answer any more: its node or its process is gone."""


class NodeShare(NamedTuple):
    """The part of a node that one worker is given.

    >>> str(NodeShare(2, 1)), str(NodeShare(1))
    ('2 CPUs and 1 GPU', '1 CPU')
    """

    cpus: float
    gpus: float = 0

    def __str__(self) -> str:
        cpus, gpus = (
            f"{count:g} {what}{'' if count == 1 else 's'}" for count, what in zip(self, ("CPU", "GPU"), strict=True)
        )
        return f"{cpus} and {gpus}" if self.gpus else cpus


class ClusterNode(NamedTuple):
    """A machine of the cluster that is up."""

    id: str
    address: str
    has: NodeShare
    """All that it has, whether it is in use or not."""

    def holds(self, bundle: NodeShare) -> int:
        """The number of such bundles that fit into an empty node.

        >>> ClusterNode("a", "10.0.0.5", NodeShare(8, 2)).holds(NodeShare(3, 1))
        2
        """
        return int(min(mine // one for mine, one in zip(self.has, bundle, strict=True) if one))


class Hosted(Protocol):
    """A `NodeHost` on a node."""

    async def ask(self, method: str, *values: Any) -> Any:
        """Calls a method of the `NodeHost`. Raises HostLost."""

    def kill(self) -> None:
        """Ends the host, and its worker with it. Returns at once."""


class Berth(Protocol):
    """A bundle that is reserved."""

    async def placed(self) -> ClusterNode:
        """Returns the node where it is, as soon as there is room for it."""

    async def host(self) -> Hosted:
        """Starts a `NodeHost` in it."""

    async def release(self) -> None:
        """Gives the bundle back."""


class Cluster(Protocol):
    """
    >>> from headrace.testing.fake_cluster import FakeCluster
    >>> async def case():
    ...     berth = await FakeCluster([NodeShare(2), NodeShare(4)]).reserve(NodeShare(3))
    ...     return (await berth.placed()).id
    >>> asyncio.run(case())
    'node 2'
    """

    address: str
    software: str
    """The software that manages its nodes, in words."""

    async def open(self) -> None:
        """Raises ConfigError if there is no such cluster."""

    async def nodes(self) -> Sequence[ClusterNode]: ...

    async def own_address(self) -> str:
        """The address at which nodes reach this machine."""

    async def reserve(self, bundle: NodeShare, avoid: Collection[str] = ()) -> Berth:
        """Asks for a bundle. `avoid`: nodes that it must not be on."""

    async def visit(self, node: ClusterNode) -> Hosted:
        """Starts a `NodeHost` on that node, without a bundle: it looks around there, and starts no worker."""

    async def aclose(self) -> None:
        """Gives all bundles back, which ends the hosts in them."""


def refusal(nodes: Sequence[ClusterNode], bundle: NodeShare, seats: Sequence[str], cluster: Cluster) -> str:
    """Returns why a bundle for each of these seats can never be placed there; empty if they can.

    >>> from headrace.testing.fake_cluster import FakeCluster
    >>> refusal([ClusterNode("a", "10.0.0.5", NodeShare(4))], NodeShare(2), ["engine 1", "engine 2"], FakeCluster([]))
    ''
    """
    room = sum(node.holds(bundle) for node in nodes)
    if room >= len(seats):
        return ""
    there = ", ".join(f"{node.address} ({node.has})" for node in nodes) or "no node"
    ranks = seats[0].startswith("trainer")
    one, many = ("a rank", "ranks") if ranks else ("an engine", "engines")
    what = one if len(seats) == 1 else f"{len(seats)} {many}"
    lower = (
        "train.parallel, train.threads (CPUs of a rank) or orchestration.rank_gpus"
        if ranks
        else "engine.replicas, engine.threads (CPUs of an engine) or orchestration.gpus"
    )
    return (
        f"the {cluster.software} cluster (orchestration.address = {cluster.address}) can never place {what} of {bundle} each: it has room for {room}. It has "
        f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}: {there}. Start more nodes, or lower {lower}"
    )
