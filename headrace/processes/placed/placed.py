"""The launcher of workers that a cluster places, and the controller's side of such a worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

from headrace.core.errors import ConfigError, HeadraceError, StalledError
from headrace.core.protocols import Heard, Job
from headrace.facts.telemetry import Telemetry
from headrace.facts.texts import plural
from headrace.processes.joining.greeting import AGREEING, ARRIVAL, SEAT, SILENCE, TOKEN, Agreed, Terms
from headrace.processes.joining.joined import ALONE, Arrivals, ElsewherePlace, SeatedWorker, Seats, SeatsWanted, Team
from headrace.processes.joining.listener import Listener, listening
from headrace.processes.launch.local import GRACE
from headrace.processes.process_end import ending
from headrace.processes.worker_place import PlaceSettings
from headrace.settings.process_config import LOCAL_HOSTS
from headrace.version import __version__

# --- The port of a cluster that places workers: the few things that a run wants of Ray.


class HostLost(HeadraceError):
    """A host does not answer any more: its node or its process is gone."""


class NodeShare(NamedTuple):
    """The part of a node that one worker is given.

    >>> str(NodeShare(2, 1)), str(NodeShare(1)), str(NodeShare(1, others={"accelerator_type:H100": 0.001}))
    ('2 CPUs and 1 GPU', '1 CPU', '1 CPU and 0.001 accelerator_type:H100')
    """

    cpus: float
    gpus: float = 0
    others: Mapping[str, float] = {}
    """Further resources by the names that the cluster's software has for them, such as GPUs of one type."""

    @property
    def amounts(self) -> dict[str, float]:
        """All that it takes, by Ray's names."""
        return {name: count for name, count in (("CPU", self.cpus), ("GPU", self.gpus), *self.others.items()) if count}

    def __str__(self) -> str:
        cpus, gpus = (
            f"{count:g} {what}{'' if count == 1 else 's'}" for count, what in ((self.cpus, "CPU"), (self.gpus, "GPU"))
        )
        return " and ".join([cpus, *[gpus] * bool(self.gpus), *(f"{n:g} {name}" for name, n in self.others.items())])


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
        here = self.has.amounts
        return int(min(here.get(name, 0) / wanted + 1e-6 for name, wanted in bundle.amounts.items()))


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
    ...     (berth,) = await FakeCluster([NodeShare(2), NodeShare(4)]).reserve(NodeShare(3))
    ...     return (await berth.placed()).id
    >>> asyncio.run(case())
    'node 2'
    """

    address: str
    software: str
    """The software that manages its nodes, in words."""
    head: str
    """The address of its head; empty before it is connected."""
    survives: float
    """Seconds that a connected process lives without the head."""

    async def head_problem(self) -> str:
        """Returns the reason why the head does not answer; empty if it does. Returns within seconds."""

    async def open(self) -> None:
        """Raises ConfigError if there is no such cluster."""

    @property
    def doubts(self) -> dict[str, float]:
        """The times (of the event loop's clock) at which nodes fell silent, by their ids. They outlast launchers: a run that goes on after the death of
        a rank has new ones at once, and the software notices a silent node only after a minute."""

    async def nodes(self) -> Sequence[ClusterNode]: ...

    async def own_address(self) -> str:
        """The address at which nodes reach this machine."""

    async def reserve(self, bundle: NodeShare, avoid: Collection[str] = (), team: Team = ALONE) -> Sequence[Berth]:
        """Asks for as many bundles as the team has seats. `avoid`: nodes that they must not be on."""

    async def visit(self, node: ClusterNode) -> Hosted:
        """Starts a `NodeHost` on that node, without a bundle: it looks around there, and starts no worker."""

    async def aclose(self) -> None:
        """Gives all bundles back, which ends the hosts in them."""


def refusal(
    nodes: Sequence[ClusterNode], bundle: NodeShare, seats: Sequence[str], cluster: Cluster, team: Team = ALONE
) -> str:
    """Returns why a bundle for each of these seats can never be placed there; empty if they can.

    >>> from headrace.testing.fake_cluster import FakeCluster
    >>> refusal([ClusterNode("a", "10.0.0.5", NodeShare(4))], NodeShare(2), ["engine 1", "engine 2"], FakeCluster([]))
    ''
    """
    whole = team.size if team.must else 1
    room = sum(node.holds(bundle) // whole * whole for node in nodes)
    if room >= len(seats):
        return ""
    there = ", ".join(f"{node.address} ({node.has})" for node in nodes) or "no node"
    ranks = seats[0].startswith("trainer")
    one, many = ("a rank", "ranks") if ranks else ("an engine", "engines")
    what = one if len(seats) == 1 else f"{len(seats)} {many}"
    lower = (
        "train.parallel, train.threads (CPUs of a rank), orchestration.rank_gpus or rank_resources"
        if ranks
        else "engine.replicas, engine.threads (CPUs of an engine), orchestration.gpus or resources"
    )
    return (
        f"the {cluster.software} cluster (orchestration.address = {cluster.address}) can never place {what} of {bundle} each"
        f"{f', {whole} of them together on one node' if whole > 1 else ''}: it has room for {room}. It has "
        f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}: {there}. Start more nodes, lower {lower}, or set orchestration.grows = true where the "
        "cluster adds nodes on demand"
    )


# --- The head of a cluster
# Ray ends every process that is connected to a head which has been away for `RAY_gcs_rpc_server_reconnect_timeout_s` (60 s), without a word and wherever it is: its
# nodes, the workers on them, and the run's own process (`src/ray/gcs_rpc_client` of Ray; seen with 2.60 after 63 s). A head comes back as what it was only if it keeps
# its state in Redis (docs.ray.io, "GCS Fault Tolerance"). Calls of workers that are up do not need it.


LOOK = 5.0
"""Seconds between two looks at a head that answered."""

AGAIN = 1.0
"""Seconds between two looks at one that did not."""

BEFORE = 20.0
"""Seconds before the end of this process by which a run stops: it writes a checkpoint."""

LOST_HEAD = "the head of the cluster does not answer"
"""The key of the warning about it."""


async def watch_head(cluster: Cluster, telemetry: Telemetry, run_dir: Path) -> NoReturn:
    """Raises StalledError, with the commands that go on, if the head stays away. Its absence is a named wait."""
    while True:
        if problem := await cluster.head_problem():
            await _until_back(cluster, telemetry, run_dir, problem)
        await asyncio.sleep(LOOK)


async def _until_back(cluster: Cluster, telemetry: Telemetry, run_dir: Path, problem: str) -> None:
    since, patience = telemetry.clock(), max(0.0, cluster.survives - BEFORE)
    what = f"the head of the {cluster.software} cluster at {cluster.head}"
    telemetry.warn(
        f"{what} does not answer ({problem}): engines and ranks that are up work on, and nobody is placed; the run stops in {patience:.0f} s if it is "
        "not back",
        key=LOST_HEAD,
    )
    async with telemetry.waits.named("cluster", f"its head at {cluster.head}", endless=True):
        while problem := await cluster.head_problem():
            away = telemetry.clock() - since
            if away >= patience:
                raise StalledError(
                    f"{what} has not answered for {away:.0f} s ({problem}), and {cluster.software} ends all processes of its cluster soon, this one too. Start the "
                    f"head and its nodes again, and then: headrace train --resume {run_dir}"
                )
            await asyncio.sleep(AGAIN)
    telemetry.withdraw(LOST_HEAD)


# --- placed ------------------------------------------------------------


HOSTED = 120.0
"""Seconds in which a host must have started and given its first answer."""

DOUBTED = 120.0
"""Seconds for which a node that fell silent is given no worker, if another one has room. Ray takes about 65 to notice that it is gone."""


async def reach_problem(settings: PlaceSettings, cluster: Cluster) -> str:
    """Returns why nodes of the cluster cannot reach the run; empty if they may be able to."""
    ours = await cluster.own_address()
    others = {node.address for node in await cluster.nodes()} - {ours}
    if not others or settings.host not in LOCAL_HOSTS:
        return ""
    return (
        f"the cluster has nodes on other machines ({', '.join(sorted(others))}), which cannot reach orchestration.listen = {settings.listen}; set "
        f'it to an address of this machine on their network, such as "{ours}:0"'
    )


class ClusterPlace(ElsewherePlace):
    """The base of places whose software starts the workers on its nodes: a run reserves a share of a node for each."""

    software: ClassVar[str]
    """The software that manages the nodes, in words."""
    own = ("address", "gpus", "resources", "rank_gpus", "rank_resources", "grows", "listen", "trainer")
    refuses_hosts = "places engines and ranks, with a token of its own, and scorers and environments join by hand"
    reserves_cores = True

    @property
    def instead_of_cores(self) -> str:  # type: ignore[override]
        return f"; {self.software} gives each engine.threads CPUs"

    @property
    def instead_of_gpus(self) -> str:  # type: ignore[override]
        return f"; {self.software} gives each orchestration.gpus"

    @property
    def given_address(self) -> str:  # type: ignore[override]
        return f"workers that {self.software} places"

    def words(self, settings: PlaceSettings, gpus: int) -> str:
        each = f" with {plural(gpus, 'GPU')} each" if gpus else ""
        return f"placed by {self.software} ({settings.address}){each}"

    def cluster(self, address: str) -> Cluster:
        """The cluster that workers are placed on. It is not connected yet."""
        raise NotImplementedError

    @asynccontextmanager
    async def open(self, wanted: SeatsWanted) -> AsyncIterator[Seats]:
        settings, say = wanted.settings, wanted.telemetry.warn
        cluster = self.cluster(settings.address)
        opening = Listener(secrets.token_hex(16), settings.host, settings.port, say=say)
        async with listening(opening, settings, say) as listener, aclosing(cluster):
            await cluster.open()
            if problem := await reach_problem(settings, cluster):
                raise ConfigError(problem)

            def launcher(bundle: NodeShare, team: Team = ALONE) -> PlacedLauncher:
                own = {"terms": wanted.terms, "logs": wanted.logs, "telemetry": wanted.telemetry}
                return PlacedLauncher(cluster, listener, bundle=bundle, team=team, grows=settings.grows, **own)  # type: ignore[arg-type]

            engines = launcher(NodeShare(wanted.threads["engine"], settings.gpus, settings.resources))
            ranks = launcher(rank_share(settings, wanted.threads["trainer"]), wanted.team)
            await ranks.open(wanted.seats.get("trainer", ()))  # they wait for each other, so that they are placed first
            await engines.open(wanted.seats.get("engine", ()))
            watch = partial(watch_head, cluster, wanted.telemetry, wanted.logs.parent)
            yield Seats(engines, ranks, engines, watch if cluster.head else None)


def rank_share(settings: PlaceSettings, threads: int) -> NodeShare:
    return NodeShare(threads, settings.rank_gpus, settings.rank_resources)


class PlacedLauncher:
    """Protocol `Launcher`. Every seat has a bundle of its own, which it keeps when its worker dies and loses with its node.

    The seats of a team lose theirs together: they are ranks, none of which goes on without the others."""

    def __init__(
        self,
        cluster: Cluster,
        arrivals: Arrivals,
        *,
        bundle: NodeShare,
        terms: Terms,
        logs: Path,
        telemetry: Telemetry,
        silence: float = SILENCE,
        team: Team = ALONE,
        grows: bool = False,
    ) -> None:
        """`grows`: whether the cluster may have nodes later that it does not have now."""
        self._team, self._grows = team, grows
        self.cluster, self.arrivals, self.bundle, self.terms, self.logs = cluster, arrivals, bundle, terms, logs
        self.telemetry, self.silence = telemetry, silence
        self._berths: dict[str, Berth] = {}
        self._mates: dict[str, Sequence[str]] = {}
        """All seats of its team, by seat."""
        self._wary = set[Berth]()
        """Bundles that avoid nodes, and may never be placed for it."""
        self._placing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Held while the first worker of a team waits for its node: the team's bundles are placed together."""
        self._taken: set[str] = set()
        """The seats that had a worker before."""

    async def open(self, seats: Sequence[str]) -> None:
        """Reserves a bundle for each seat. Raises ConfigError if they can never be had."""
        message = refusal(await self.cluster.nodes(), self.bundle, seats, self.cluster, self._team)
        if message and not self._grows:
            raise ConfigError(message)
        for first in range(0, len(seats), self._team.size):
            team = seats[first : first + self._team.size]
            self._mates |= dict.fromkeys(team, team)
            await self._reserve(team[0], await self._doubted())

    def worker(self, job: Job, heard: Heard) -> PlacedWorker:
        if job.kind == "shared trainer" or job.inherited:
            raise ConfigError(f"a cluster cannot place the {job.who}: it shares files with another process")
        again = job.who in self._taken
        self._taken.add(job.who)
        return PlacedWorker(job, heard, self, again=again)

    async def place(self, who: str) -> tuple[Berth, ClusterNode]:
        """Returns the bundle of that seat and its node, as soon as there is room for it."""
        async with self._placing[self._mates.get(who, (who,))[0]]:
            berth = self._berths.get(who) or await self._reserve(who, await self._doubted())
            if berth in self._wary:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DOUBTED):
                        return berth, await berth.placed()
                await self.leave(who)  # the other nodes are full: the doubted one has recovered, or is no node any more
                berth = await self._reserve(who)
            return berth, await berth.placed()

    async def _reserve(self, who: str, avoid: Collection[str] = ()) -> Berth:
        team = self._mates.get(who, (who,))
        berths = await self.cluster.reserve(self.bundle, avoid, self._team._replace(size=len(team)))
        self._berths |= zip(team, berths, strict=True)
        if avoid:
            self._wary.update(berths)
        return self._berths[who]

    async def _doubted(self) -> set[str]:
        """Returns the nodes to avoid; none if no other node could hold a bundle."""
        now = asyncio.get_running_loop().time()
        found = {node for node, since in self.cluster.doubts.items() if now - since < DOUBTED}
        others = [node for node in await self.cluster.nodes() if node.id not in found]
        return found if any(node.holds(self.bundle) for node in others) else set()

    async def leave(self, who: str, doubted: str = "") -> None:
        """Gives the bundle of that seat back, so that its next worker gets another one. `doubted`: the node that does not answer."""
        if doubted:
            self.cluster.doubts[doubted] = asyncio.get_running_loop().time()
        for mate in self._mates.get(who, (who,)):
            if berth := self._berths.pop(mate, None):
                await berth.release()


class PlacedWorker(SeatedWorker):
    """Protocol `Worker`."""

    def __init__(self, job: Job, heard: Heard, launcher: PlacedLauncher, *, again: bool) -> None:
        """`again`: whether it replaces one that was lost. The run then goes on without it if it can, and its other waits have deadlines."""
        super().__init__(job.who, heard, launcher.telemetry, launcher.silence)
        self._job, self._launcher, self._again = job, launcher, again
        self._node: ClusterNode | None = None
        self._host: Hosted | None = None
        self._collecting: asyncio.Task[str] | None = None
        """Writes the worker's log, and returns how it ended. Raises HostLost."""
        self._where, self._killed = "", False

    async def start(self) -> None:
        """Returns when the worker has connected or is lost (`watch` then says how). Raises ConfigError if its node cannot serve the run, and
        StalledError."""
        self._begin()
        launcher, waits = self._launcher, self._telemetry.waits
        async with waits.named(
            "start",
            f"the cluster at {launcher.cluster.address} to place {self.who} ({launcher.bundle})",
            endless=self._again,
        ):
            berth, self._node = await launcher.place(self.who)
        self._where = f"on {self._node.address}"
        try:
            async with waits.named("start", f"{self.who} to start on {self._node.address}", endless=self._again):
                await self._start_in(berth)
        except (HostLost, TimeoutError) as error:
            self._lost(str(error) or "it did not start in time")
        except ConfigError as error:
            if not self._again:
                raise
            self._lost(str(error))

    async def _start_in(self, berth: Berth) -> None:
        launcher, arrivals = self._launcher, self._launcher.arrivals
        async with asyncio.timeout(HOSTED):
            self._host = host = await berth.host()
            check_versions(await host.ask("look"))
        async with asyncio.timeout(AGREEING):
            agreed: Agreed = await host.ask("agree", launcher.terms)
        if agreed.unable:
            raise ConfigError(f"the node {self._where[3:]} cannot serve this run: {agreed.unable}")
        seat = secrets.token_hex(8)
        arrival = arrivals.expect(self._job.kind, seat)
        try:
            async with asyncio.timeout(ARRIVAL):
                given = {TOKEN: arrivals.token, SEAT: seat}
                pid = await host.ask("start", self._job.kind, arrivals.address, given)
                self._where += f" (process {pid})"
                self._collecting = collecting = asyncio.ensure_future(self._collect(host))
                waited: list[asyncio.Future[Any]] = [arrival, collecting]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                self._seat(arrival.result(), agreed.model_dir)
            else:
                self._lost("")
        finally:
            arrival.cancel()

    async def _collect(self, host: Hosted) -> str:
        log = self._launcher.logs / f"{self.who.replace(' ', '-')}.log"
        while True:
            data, code = await host.ask("output")
            with contextlib.suppress(OSError), log.open("ab") as file:  # a full disk must not lose the exit code
                file.write(data)
            if code is not None:
                return ending(code)

    async def end(self) -> None:
        """The worker ends by itself when its connection is closed. Its last words are awaited."""
        await self.channel.close()
        if self._collecting and not self._killed:
            with contextlib.suppress(HostLost, TimeoutError):
                async with asyncio.timeout(GRACE):
                    await asyncio.shield(self._collecting)
        if self._collecting:
            self._collecting.cancel()
            await asyncio.wait([self._collecting])
        self.kill()

    def kill(self) -> None:
        self._killed = True
        if self._host:
            self._host.kill()

    async def _how_it_ended(self, wrong: str) -> str:
        assert self._node
        if wrong:
            await self._launcher.leave(self.who, self._node.id)
            return f"{self._where} is lost: {wrong}"
        assert self._collecting
        try:
            async with asyncio.timeout(GRACE):
                how = await asyncio.shield(self._collecting)
                return f"{self._where} {how}"
        except TimeoutError:
            await self._launcher.leave(self.who, self._node.id)
            return f"{self._where} is lost: its connection has ended, and its node does not answer"
        except HostLost as error:
            await self._launcher.leave(self.who)
            return f"{self._where} is lost: {error}"


def check_versions(there: dict[str, str]) -> None:
    """Raises ConfigError for a node that has another headrace or Python than this process. `there`: the result of `NodeHost.look`."""
    here = {"headrace": __version__, "Python": "{}.{}".format(*sys.version_info)}
    for what, ours in here.items():
        if (theirs := there[what]) != ours:
            has = f"has {what} {theirs}" if theirs else f"has no {what}"
            raise ConfigError(
                f"the node {there['host']} of the cluster {has}, and the run has {ours}; install the same on all nodes, in the environment that "
                "its Ray was started from"
            )
