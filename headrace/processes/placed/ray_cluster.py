"""Ray, as far as a run uses it. Its calls block, so that each is made in the one thread that this file keeps for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from headrace.core.errors import ConfigError
from headrace.facts.texts import clip
from headrace.processes.joining.joined import ALONE, Team
from headrace.processes.placed import host
from headrace.processes.placed.placed import ClusterNode, ClusterPlace, HostLost, NodeShare
from headrace.processes.worker_place import PlaceSettings

R = TypeVar("R")

OWN = "local"
"""The address of a cluster that the run starts on this machine, and ends."""

STORE_BYTES = 80 << 20
"""Room for objects in a cluster of the run's own, near the least that Ray accepts: nothing large goes through Ray."""

QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".*"}
"""Ray prints errors of nodes into the terminal of the run, whatever it was told about logs: none of their lines."""

GUARDED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""The environment of a cluster of the run's own. Ray listens on all addresses of a machine, and who is let in may run anything: so nobody
is let in without this token. It also reports to nobody how it is used."""

RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The variable of the seconds after which Ray ends a process that does not reach its head; 60 without it."""
ANSWERS = 3.0
"""Seconds in which a head accepts a connection."""

OF_RAY = ("CPU", "GPU", "memory", "object_store_memory")
"""The names of what Ray counts on every node."""
_RESERVED = re.compile(r"node:|.*_group_(\d+_)?[0-9a-f]{16,}$")
"""Matches the name of a node itself, and of what a placement group has reserved there."""
NODE_ID = "ray.io/node-id"
"""The label that Ray gives to every node."""


class RayHosted:
    """Protocol `Hosted`."""

    def __init__(self, actor: Any, cluster: RayCluster) -> None:
        self._actor, self._cluster = actor, cluster

    async def ask(self, method: str, *values: Any) -> Any:
        import ray

        try:
            return await self._cluster.result(lambda: getattr(self._actor, method).remote(*values))
        except ray.exceptions.RayTaskError as error:
            raise HostLost(f"its host failed: {error.cause!r}") from error
        except ray.exceptions.RayError as error:  # its message has many lines that say no more
            raise HostLost(f"Ray has lost its host ({type(error).__name__})") from error

    def kill(self) -> None:
        import ray

        self._cluster.later(lambda: ray.kill(self._actor))


class RayBerth:
    """Protocol `Berth`."""

    def __init__(self, group: Any, index: int, bundle: NodeShare, cluster: RayCluster) -> None:
        self._group, self._index, self._bundle, self._cluster = group, index, bundle, cluster

    async def placed(self) -> ClusterNode:
        await self._cluster.result(self._group.ready)
        return await self._cluster.do(self._node)

    def _node(self) -> ClusterNode:
        from ray.util import placement_group_table

        where = placement_group_table(self._group)["bundles_to_node_id"][self._index]
        found = {node.id: node for node in all_nodes()}
        return found.get(where) or ClusterNode(where, where, NodeShare(0))

    async def host(self) -> RayHosted:
        return RayHosted(await self._cluster.do(self._begin), self._cluster)

    def _begin(self) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._index)
        return _actor(strategy, self._bundle)

    async def release(self) -> None:
        from ray.util import remove_placement_group

        self._cluster.berths.discard(self)
        await self._cluster.do(lambda: remove_placement_group(self._group))


class RayPlace(ClusterPlace):
    name = "ray"
    about = "Ray places its engines on the nodes of a cluster"
    software = "Ray"
    needs = "ray", software

    def problems(self, settings: PlaceSettings) -> Iterator[str]:
        if settings.address not in ("local", "auto") and not re.fullmatch(r"[^\s:/]+:[0-9]{1,5}", settings.address):
            yield (
                f'orchestration.address = "{settings.address}" is not "local", "auto" or HOST:PORT; a run starts on a machine of the cluster, and not '
                "through Ray's client (ray://)"
            )
        for what, given in (("", settings.resources), ("rank_", settings.rank_resources)):
            for name, count in given.items():
                if name in OF_RAY:
                    own = f"{'train' if what else 'engine'}.threads CPUs and orchestration.{what}gpus GPUs"
                    yield f"orchestration.{what}resources names {name}, and Ray gives {own}; set these, and remove it"
                elif round(count, 4) != count or (count > 1 and count % 1):
                    yield (
                        f"orchestration.{what}resources: {name} = {count:g}, and Ray takes whole numbers, or below 1 at most four decimal places; round it"
                    )

    def cluster(self, address: str) -> RayCluster:
        return RayCluster(address)


class RayCluster:
    """Protocol `Cluster`."""

    software = RayPlace.software
    doubts: ClassVar[dict[str, float]] = {}
    """The nodes of all clusters that this process has used: Ray's ids of nodes are unique."""

    def __init__(self, address: str) -> None:
        """`address`: `local`, `auto` (the cluster that this machine is a node of) or HOST:PORT."""
        self.address, self.head = address, ""
        self.survives = float(os.environ.get(RECONNECTS, "60"))
        self.berths: set[RayBerth] = set()
        self._thread = ThreadPoolExecutor(1, "headrace-ray")
        self._connected = False
        """Whether this process was connected by us, and not by the caller's own program."""

    async def do(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def result(self, call: Callable[[], Any]) -> Any:
        """Waits for the object that a call promises. The thread goes on meanwhile."""
        return await asyncio.wrap_future((await self.do(call)).future())

    def later(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self._thread.submit(call)

    async def open(self) -> None:
        await self.do(self._connect)

    def _connect(self) -> None:
        if "ray" not in sys.modules:  # it reads them when it is imported
            for name, value in (QUIET | (GUARDED if self.address == OWN else {})).items():
                os.environ.setdefault(name, value)
        import ray

        if ray.is_initialized():
            self.head = ray.get_runtime_context().gcs_address
            return
        own: dict[str, Any] = {"address": self.address}
        if self.address == OWN:
            own |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        try:
            ray.init(**own, namespace="headrace", log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray raises plain ones too
            remedy = (
                "try again"
                if self.address == OWN
                else "the run must be on a machine of the cluster (ray start --address=HOST:PORT)"
            )
            raise ConfigError(f"orchestration.address = {self.address}: {clip(str(error), 400)}; {remedy}") from error
        self._connected, self.head = True, ray.get_runtime_context().gcs_address

    async def head_problem(self) -> str:
        """Connects to the head's port itself: calls of Ray wait for the head."""
        host, _, port = self.head.rpartition(":")
        try:
            async with asyncio.timeout(ANSWERS):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except OSError as error:  # a TimeoutError too
            if (error.errno or 0) > 0:
                return os.strerror(error.errno or 0)
            return error.strerror or "it is silent"  # of a name that cannot be resolved the number is negative
        return ""

    async def nodes(self) -> Sequence[ClusterNode]:
        return await self.do(all_nodes)

    async def own_address(self) -> str:
        import ray

        return await self.do(ray.util.get_node_ip_address)

    async def reserve(self, bundle: NodeShare, avoid: Collection[str] = (), team: Team = ALONE) -> Sequence[RayBerth]:
        from ray.util import placement_group

        strategy = "STRICT_PACK" if team.must else "PACK"
        labels = [{NODE_ID: f"!in({', '.join(sorted(avoid))})"}] * team.size if avoid else None
        room = [bundle.amounts] * team.size
        group = await self.do(lambda: placement_group(room, strategy=strategy, bundle_label_selector=labels))
        berths = [RayBerth(group, index, bundle, self) for index in range(team.size)]
        self.berths.update(berths)
        return berths

    async def visit(self, node: ClusterNode) -> RayHosted:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        return RayHosted(await self.do(lambda: _actor(there, NodeShare(0))), self)

    async def aclose(self) -> None:
        """Gives nothing back to a cluster without a head: Ray ends the workers by itself."""
        if self.head and await self.head_problem():
            self._thread.shutdown(wait=False, cancel_futures=True)
            return
        for berth in list(self.berths):
            await berth.release()
        if self._connected:
            import ray

            await self.do(ray.shutdown)
        self._thread.shutdown(wait=False)


def _actor(strategy: Any, bundle: NodeShare) -> Any:
    """A `NodeHost`. It is never started again: its worker would be lost all the same."""
    import ray

    ray.cloudpickle.register_pickle_by_value(host)  # see `host.py`
    return (
        ray.remote(host.NodeHost)
        .options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            resources=dict(bundle.others),
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        .remote()
    )


def _share(has: Mapping[str, float]) -> NodeShare:
    """`has`: all that Ray counts on a node. Memory, the node's own name and the bundles that are reserved there are no resources that a run asks for.

    >>> str(_share({"CPU": 4, "GPU_A100": 1, "node:10.0.0.5": 1, "GPU_A100_group_0_0123456789abcdef": 1}))
    '4 CPUs and 1 GPU_A100'
    """
    others = {name: count for name, count in has.items() if name not in OF_RAY and not _RESERVED.match(name)}
    return NodeShare(has.get("CPU", 0), has.get("GPU", 0), others)


def all_nodes() -> list[ClusterNode]:
    import ray

    return [
        ClusterNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            _share(node["Resources"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
