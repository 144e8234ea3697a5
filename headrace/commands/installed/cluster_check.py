"""`headrace doctor --cluster CONFIG`: whether all machines of a run have the same packages and the model, and reach the run: the nodes of its
Ray cluster, or the workers that join it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import importlib.metadata
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace.commands.installed.doctor import GIB, DoctorFinding, State, print_findings
from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.facts.texts import plural
from headrace.models.resolve import resolve_model
from headrace.processes.joining.greeting import DoctorAnswer, DoctorQuestion, Hello, Kind, Terms
from headrace.processes.joining.joined import invitation, secrets_of
from headrace.processes.joining.listener import Listener
from headrace.processes.joining.same_model import terms_of
from headrace.processes.placed.examined import ExaminedWorker
from headrace.processes.placed.host import PACKAGES, NodeHost
from headrace.processes.placed.placed import (
    Cluster,
    ClusterNode,
    ClusterPlace,
    Hosted,
    HostLost,
    NodeShare,
    rank_share,
    reach_problem,
    refusal,
)
from headrace.processes.places import PLACES, quoted
from headrace.run.config import RunConfig
from headrace.run.seats import (
    check_seats,
    ranks_of,
    seats_of,
    team_of,
    terms_of_code,
    threads_elsewhere,
    threads_of_rank,
)
from headrace.version import __version__
from headrace.weight_sync.config import reached_at

# --- Whether the machines of a run see one directory
# Each writes a file there, in the way of checkpoints and weights, and each reads those of all others. Two machines that have different
# directories under one path, or one that sees another's files late, would be noticed in the middle of a run.


SEEN = 30.0
"""Seconds in which a machine must see what another one has written. NFS keeps what it knows of a directory for as long, unless it is asked not to."""

WHAT = "shared directory"


class AskedMachine(Protocol):
    """A machine: `Hosted`, as far as it is wanted here."""

    async def ask(self, method: str, *values: Any) -> Any: ...


class ThisMachine:
    """Protocol `AskedMachine`."""

    async def ask(self, method: str, *values: Any) -> Any:
        return await getattr(NodeHost(), method)(*values)


class SharedPlace(NamedTuple):
    """A directory that all machines have to see."""

    directory: Path
    use: str
    setting: str


def shared_places(config: RunConfig) -> list[SharedPlace]:
    """Returns the directories that machines of this run share."""
    found = []
    if ranks_of(config.orchestration, config.train):
        found.append(SharedPlace(Path(config.out), "checkpoints, which all ranks write and read", "out"))
    if config.engine.shared_dir:
        found.append(SharedPlace(Path(config.engine.shared_dir), "weights as files", "engine.shared_dir"))
    kind, _, place = config.orchestration.bus.partition(":")
    if kind == "jsonl":
        found.append(SharedPlace(Path(place), "the bus", "orchestration.bus"))
    return [shared_place._replace(directory=shared_place.directory.absolute()) for shared_place in found]


class SharedCheck:
    """The files of one examination."""

    def __init__(self, places: list[SharedPlace], within: float = SEEN) -> None:
        self._places, self._within, self._mark = places, within, secrets.token_hex(8)
        self._left: dict[str, dict[Path, str]] = {}
        """The problem of each directory in which a machine could not write, or an empty string; by machine."""
        self._numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def machines(self) -> int:
        """The number of machines that have written."""
        return len(self._left)

    def wrote(self, who: str) -> bool:
        """Whether a machine was asked to write."""
        return who in self._left

    @contextmanager
    def open(self) -> Iterator[None]:
        """Makes the directories where they are missing, as the run would, and removes the files of this examination in the end."""
        for place in self._places:
            with contextlib.suppress(OSError):
                place.directory.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            for place in self._places:
                for path in place.directory.glob(f".shared-{self._mark}-*"):
                    with contextlib.suppress(OSError):
                        path.unlink()

    async def leave(self, who: str, machine: AskedMachine) -> None:
        """Has a machine write its files."""
        problems = {
            place.directory: await machine.ask("leave", *self._file(who, place.directory)) for place in self._places
        }
        self._left[who] = problems

    async def findings(self, who: str, machine: AskedMachine) -> list[DoctorFinding]:
        """Has a machine read the files of all others that could write theirs, and remove its own where the run's machine does not see it."""
        found = [await self._finding(who, machine, place) for place in self._places]
        for place in self._places:
            path, _ = self._file(who, place.directory)
            if not await asyncio.to_thread(Path(path).exists):
                await machine.ask("drop", path)
        return found

    async def _finding(self, who: str, machine: AskedMachine, place: SharedPlace) -> DoctorFinding:
        directory, own = place.directory, self._left[who][place.directory]
        remedy = f"mount it under the same path on all machines (NFS, say), or set {place.setting} to one that all of them see"
        if own:
            return DoctorFinding(WHAT, "bad", f"{directory} ({place.use}): cannot write into it: {own}", remedy)
        others = [name for name, problems in self._left.items() if name != who and not problems[directory]]
        waited = 0.0
        for other in others:
            problem, seconds = await machine.ask("find", *self._file(other, directory), self._within)
            waited += seconds
            if problem:
                message = f"{directory} ({place.use}): what {other} wrote {problem} within {self._within:g} s"
                return DoctorFinding(WHAT, "bad", message, remedy)
        seen = f"files of {len(others)} other{'' if len(others) == 1 else 's'} seen after {waited:.1f} s"
        return DoctorFinding(WHAT, "ok", f"{directory} ({place.use}): {seen}")

    def _file(self, who: str, directory: Path) -> tuple[str, str]:
        """The path of a machine's file, and the word that it is made of."""
        number = self._numbers.setdefault(who, len(self._numbers))
        return str(directory / f".shared-{self._mark}-{number}"), f"{self._mark} {number}\n"


async def until_all(check: SharedCheck, machine: AskedMachine, everyone: asyncio.Event, between: float = 2.0) -> None:
    """Waits for the other machines, and asks this one for the time meanwhile: a worker that hears nothing would leave."""
    while check and not everyone.is_set():
        await machine.ask("clock")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(between):
                await everyone.wait()


# --- cluster check ------------------------------------------------------------


SENT = 32_000_000
"""Bytes that every node fetches."""

PATIENCE = 120.0
"""Seconds for which a node is asked."""

ARRIVALS = 120.0
"""Seconds for which workers are awaited."""

CLOCKS = 1.0
"""Seconds by which the clock of a node may differ: logs of several machines are read side by side."""

HERE = "the run's machine"

Findings = list[DoctorFinding]


def examine_cluster(config: RunConfig) -> int:
    """Prints a table for every machine. Returns 0 if a run can start, 1 if something is in its way. Raises ConfigError if there is no cluster."""
    place = config.orchestration
    if not place.takes_workers:
        others = sorted((kind.name for kind in PLACES.values() if kind.elsewhere), key=lambda name: PLACES[name].joins)
        raise ConfigError(
            f'--cluster looks at other machines, and orchestration.kind = "{place.kind}" has none; set it to {quoted(others)}, or scorers or '
            "environments"
        )
    check_seats(place)
    if isinstance(place.place, ClusterPlace):
        return print_findings(asyncio.run(findings_of(config, place.place.cluster(place.address))))
    return print_findings(asyncio.run(findings_of_joining(config)))


async def findings_of(config: RunConfig, cluster: Cluster, within: float = SEEN) -> dict[str, Findings]:
    """Returns the findings by title: about the whole cluster, then about each node that could hold an engine or a rank. `within`: seconds in
    which machines must see each other's files."""
    check = SharedCheck(shared_places(config), within)
    with check.open():
        async with aclosing(cluster), sending(config.orchestration.host) as (address, token):
            await cluster.open()
            found, nodes = await _cluster(config, cluster)
            await check.leave(HERE, ThisMachine())
            terms = terms_of(config.model.path, await asyncio.to_thread(resolve_model, config.model.path))
            for title, node in nodes.items():

                async def ask(hosted: Hosted, title: str = title) -> Findings:
                    findings = await _ask(hosted, terms, address, token)
                    await check.leave(title, hosted)
                    return findings

                found[title] = await _visited(cluster, node, ask)
            found["Cluster"] += await check.findings(HERE, ThisMachine())
            for title, node in nodes.items() if check else ():
                if check.wrote(title):
                    found[title] += await _visited(cluster, node, functools.partial(check.findings, title))
            return found


async def _cluster(config: RunConfig, cluster: Cluster) -> tuple[dict[str, Findings], dict[str, ClusterNode]]:
    """Returns the findings about the whole, and the nodes that could hold an engine or a rank, by title."""
    place, ranks = config.orchestration, ranks_of(config.orchestration, config.train)
    bundle = NodeShare(threads_elsewhere(place, config.engine, config.chosen), place.gpus, place.resources)
    rank = rank_share(place, threads_of_rank(place, config.train, config.chosen))
    engines = [f"engine {number}" for number in range(config.engine.replicas if place.elsewhere else 0)]
    nodes = await cluster.nodes()
    small: State = "note" if place.grows else "bad"
    problems: dict[str, State] = {
        refusal(nodes, bundle, engines, cluster): small,
        refusal(nodes, rank, ranks, cluster, team_of(config.train.parallel)): small,
        await reach_problem(place, cluster): "bad",
    }
    findings = [DoctorFinding("the run", mark, problem) for problem, mark in problems.items() if problem]
    room = f"{sum(node.holds(bundle) for node in nodes)} engines of {bundle}; the run wants {len(engines)}"
    ranks_room = f"{sum(node.holds(rank) for node in nodes)} ranks of {rank}; the run wants {len(ranks)}"
    trainer = DoctorFinding(
        "trainer",
        "ok",
        ranks_room if ranks else "stays on this machine, as a child of the run (orchestration.trainer)",
    )
    held = [node for node in nodes if node.holds(bundle) or (ranks and node.holds(rank))]
    titles = {f"Node {node.address} ({node.has}), {node.id[:6]}": node for node in held}
    return {"Cluster": [*(findings or [DoctorFinding("room", "ok", room)]), trainer]}, titles


async def findings_of_joining(config: RunConfig, within: float = SEEN) -> dict[str, Findings]:
    """Waits for as many workers as the run has seats, and asks each one. Returns the findings by title. `within`: as of `findings_of`."""
    place = config.orchestration
    token, tls = secrets_of(place)
    terms = terms_of(config.model.path, await asyncio.to_thread(resolve_model, config.model.path))
    away: list[str] = []
    check = SharedCheck(shared_places(config), within)
    await check.leave(HERE, ThisMachine())
    with check.open():
        async with sending(place.host, reached_at(config.weight_sync, config.ends)) as (address, key):
            seats = {kind: len(names) for kind, names in seats_of(place, config.engine, config.train).items()}
            workers = _Workers(check, (terms, address, key), seats, terms_of_code(config))
            listener = Listener(
                token, place.host, place.port, terms=terms, tls=tls, examine=workers.examine, say=away.append
            )
            try:
                await listener.open()
                echo(invitation(place, seats_of(place, config.engine, config.train), listener.address), err=True)
                await workers.until_asked()
            except OSError as error:
                raise ConfigError(f"orchestration.listen = {place.listen}: {error.strerror or error}") from None
            finally:
                await listener.close()
        strangers = (DoctorFinding("a stranger", "note", words) for words in away)
        return {"Workers": [workers.came(), *await check.findings(HERE, ThisMachine()), *strangers], **workers.found}


class _Workers:
    """The workers that join to be asked."""

    def __init__(
        self, check: SharedCheck, asked: tuple[Any, str, str], seats: Mapping[Kind, int], code: Mapping[Kind, Terms]
    ) -> None:
        """`code`: the terms of those who run the user's code, and share no directory with the others."""
        self.found: dict[str, Findings] = {}
        self._check, self._asked, self._code = check, asked, code
        self._wanted = self._seats = sum(seats.values())
        self._hosts = sum(count for kind, count in seats.items() if kind in code)
        self._left = Counter(seats)
        """The seats for which nobody has come yet."""
        self._all_wrote, self._finished = asyncio.Event(), asyncio.Event()
        self._done = 0

    async def examine(self, hello: Hello, ask: Callable[[DoctorQuestion], Awaitable[DoctorAnswer]]) -> None:
        kind = f", {hello.kind}" if self._code else ""
        title, worker = f"Worker {len(self.found) + 1}{kind}: {hello.host} (process {hello.pid})", ExaminedWorker(ask)
        terms, *place = self._asked
        findings = self.found[title] = []
        try:
            async with asyncio.timeout(PATIENCE):
                findings += await _ask(worker, self._code.get(hello.kind, terms), *place)
            if hello.kind not in self._code:
                findings += await self._shares(title, worker)
        except (TimeoutError, HostLost) as error:
            findings.append(DoctorFinding("the worker", "bad", str(error) or f"did not answer in {PATIENCE:g} s"))
        self._done += 1
        self._left[hello.kind] -= 1
        if self._seats <= self._done == len(self.found):
            self._finished.set()

    async def _shares(self, title: str, worker: ExaminedWorker) -> Findings:
        async with asyncio.timeout(PATIENCE):
            await self._check.leave(title, worker)
        if self._check.machines > self._seats - self._hosts:
            self._all_wrote.set()
        await until_all(self._check, worker, self._all_wrote)
        async with asyncio.timeout(PATIENCE):
            return await self._check.findings(title, worker)

    async def until_asked(self) -> None:
        """Returns when as many as there are seats were asked, or no more are awaited."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVALS):
                await self._finished.wait()
                return
        self._all_wrote.set()
        if self._check and self.found:  # they read each other's files now
            self._seats = len(self.found)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self._finished.wait()

    def came(self) -> DoctorFinding:
        came, wanted = len(self.found), f"the run has {self._wanted} seat{'s' if self._wanted > 1 else ''}"
        lacking = ", ".join(sorted(kind for kind, left in self._left.items() if left > 0))
        missing = f"start more within {ARRIVALS:g} s (--offers {lacking})" if lacking else ""
        return DoctorFinding("workers", "bad" if missing else "ok", f"{came} came; {wanted}", missing)


async def _visited(cluster: Cluster, node: ClusterNode, ask: Callable[[Hosted], Awaitable[Findings]]) -> Findings:
    try:
        async with asyncio.timeout(PATIENCE):
            hosted = await cluster.visit(node)
            try:
                return await ask(hosted)
            finally:
                hosted.kill()
    except TimeoutError:
        return [DoctorFinding("the node", "bad", f"did not answer in {PATIENCE:g} seconds", "restart it, or remove it")]
    except HostLost as error:
        return [DoctorFinding("the node", "bad", str(error), f"read {cluster.software}'s logs on it")]


async def _ask(hosted: Hosted, terms: Any, address: str, token: str) -> Findings:
    there = await hosted.ask("look")
    before = time.time()
    clock = await hosted.ask("clock")
    found = [*versions(there), _clock(clock, before, time.time())]
    if not there["headrace"]:
        return found
    has = await hosted.ask("machine")
    found.append(
        DoctorFinding(
            "machine", "ok", f"{has['cores']:g} cores, {has['free'] / GIB:.1f} of {has['memory'] / GIB:.1f} GiB free"
        )
    )
    agreed = await hosted.ask("agree", terms)
    about, fine = ("model", agreed.model_dir) if terms.model else ("user code", plural(len(terms.files), "file"))
    found.append(DoctorFinding(about, "bad" if agreed.unable else "ok", agreed.unable or fine))
    problem, seconds = await hosted.ask("fetch", address, token, SENT)
    if problem:
        remedy = "let its machine reach every port of orchestration.listen's host: the run's, and that of the weights"
        return [*found, DoctorFinding("network", "bad", f"cannot reach {address}: {problem}", remedy)]
    problem, back = await hosted.ask("give", address, token, SENT)
    if problem:
        return [*found, DoctorFinding("network", "bad", f"cannot send to {address}: {problem}")]
    speeds = f"{SENT / seconds / 1e6:.0f} MB/s from {address}, {SENT / back / 1e6:.0f} MB/s back"
    return [*found, DoctorFinding("network", "ok", speeds)]


def versions(there: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Compares the packages of a node with those here: engine and trainer must compute the same."""
    here = {"headrace": __version__, "Python": "{}.{}".format(*sys.version_info)}
    here |= {name: importlib.metadata.version(name) for name in PACKAGES}
    for name, ours in here.items():
        theirs = there[name] or "none"
        remedy = (
            ""
            if theirs == ours
            else f"the run has {ours}: install the same in the environment that its worker is started from"
        )
        yield DoctorFinding(name, "bad" if remedy else "ok", theirs, remedy)


def _clock(theirs: float, before: float, after: float) -> DoctorFinding:
    ahead, unsure = theirs - (before + after) / 2, (after - before) / 2
    far = abs(ahead) - unsure > CLOCKS
    difference = f"{abs(ahead):.3f} s {'ahead' if ahead > 0 else 'behind'} (± {unsure:.3f} s)"
    return DoctorFinding(
        "clock", "note" if far else "ok", difference, "times in its logs are not the run's: use NTP" if far else ""
    )


@asynccontextmanager
async def sending(host: str, shown: str = "") -> AsyncIterator[tuple[str, str]]:
    """Listens at any port for machines, and sends them bytes or takes theirs. Yields the address, and the token that they must know. `shown`: the
    host at which they reach it, if it is another one."""
    token = secrets.token_hex(16)

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not hmac.compare_digest(await reader.readexactly(len(token)), token.encode()):
                return
            if await reader.readexactly(1) == b"<":
                writer.write(bytes(SENT))
            else:
                left = SENT
                while left and (data := await reader.read(1 << 20)):
                    left -= len(data)
                writer.write(b"" if left else b".")
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(send, host, 0)
    async with server:
        where, port = server.sockets[0].getsockname()[:2]
        yield f"{shown or where}:{port}", token
