"""The nodes of a simulated cluster: which seat is where, what its network does, and when a seat can be used again after a failure."""

from __future__ import annotations

import asyncio
import heapq

from headrace.testing.faultsim.cluster.sizing import ClusterSize

LATENCY = 0.0005
"""Seconds of a message."""


class NodeLink:
    """The connection of a node to the controller. Protocol `Network`."""

    scale = LATENCY

    def __init__(self) -> None:
        self.down_until = 0.0
        self.slow_until = 0.0
        self.cut = False
        """Whether nothing arrives any more: the node is gone."""
        self.repeats = 0
        """Messages that will arrive twice."""

    def seconds(self, scale: float) -> float:
        return scale + max(0.0, self.down_until - asyncio.get_running_loop().time())

    def copies(self) -> int:
        if self.cut:
            return 0
        if self.repeats:
            self.repeats -= 1
            return 2
        return 1

    @property
    def slowed(self) -> float:
        """The factor by which new weights take longer."""
        return 30.0 if asyncio.get_running_loop().time() < self.slow_until else 1.0


class Machines:
    """Seats are `engine 0`, `engine 1`, ..., and `trainer rank 0`, ... They outlast the controller's processes."""

    def __init__(self, size: ClusterSize) -> None:
        self._size = size
        each = size.node_gpus // size.gpus_per_engine
        self.engine_nodes = -(-size.engines // each)
        self.nodes = self.engine_nodes + -(-size.ranks // size.node_gpus)
        self._node_of = {f"engine {i}": i // each for i in range(size.engines)}
        ranks = {f"trainer rank {i}": self.engine_nodes + i // size.node_gpus for i in range(size.ranks)}
        self._node_of |= ranks
        self._links = [NodeLink() for _ in range(self.nodes)]
        self._free_at = dict.fromkeys(self._node_of, 0.0)
        self._spares = [0.0] * size.spare_nodes
        """The times from which each spare node can be used."""

    def link(self, seat: str) -> NodeLink:
        return self._links[self._node_of[seat]]

    def rack(self, number: int) -> list[NodeLink]:
        first = number * self._size.rack_nodes
        return self._links[first : first + self._size.rack_nodes]

    @property
    def racks(self) -> int:
        return -(-self.nodes // self._size.rack_nodes)

    def seats_on(self, node: int) -> list[str]:
        return [seat for seat, place in self._node_of.items() if place == node]

    def seat_of(self, gpu: int) -> str:
        """Returns the seat that a GPU belongs to."""
        first = self._size.engines * self._size.gpus_per_engine
        return f"engine {gpu // self._size.gpus_per_engine}" if gpu < first else f"trainer rank {gpu - first}"

    def cut(self, node: int) -> None:
        """The node is gone. Whatever takes its place has a link of its own."""
        self._links[node].cut = True
        self._links[node] = NodeLink()

    def replace(self, seats: list[str], now: float) -> None:
        """Seats whose hardware has failed are free again when a spare node has taken its place."""
        spare = heapq.heappop(self._spares) if self._spares else now + self._size.repair
        heapq.heappush(self._spares, now + self._size.repair)
        for seat in seats:
            self._free_at[seat] = max(now, spare) + self._size.swap_node

    def seconds_until_free(self, seat: str, now: float) -> float:
        return max(0.0, self._free_at[seat] - now)
