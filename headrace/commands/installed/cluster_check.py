"""`headrace doctor --cluster CONFIG`: whether all machines of a run have the same packages and the model, and reach the run: the nodes of its
Ray cluster, or the workers that join it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.metadata
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from headrace.commands.installed.doctor import GIB, DoctorFinding, print_findings
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.models.resolve import resolve_model
from headrace.observe.texts import plural
from headrace.orchestration.seats import (
    check_seats,
    invitation,
    ranks_of,
    reach_problem,
    seats_of,
    secrets_of,
    threads_elsewhere,
    threads_of_rank,
)
from headrace.orchestration.user_sites import terms_of_code
from headrace.orchestration.workers.build import open_cluster
from headrace.orchestration.workers.joining.greeting import DoctorAnswer, DoctorQuestion, Hello, Kind
from headrace.orchestration.workers.joining.listener import Listener
from headrace.orchestration.workers.joining.same_model import terms_of
from headrace.orchestration.workers.placed.cluster import Cluster, ClusterNode, Hosted, HostLost, NodeShare, refusal
from headrace.orchestration.workers.placed.examined import ExaminedWorker
from headrace.orchestration.workers.placed.host import PACKAGES
from headrace.version import __version__
from headrace.weight_sync.config import reached_at

SENT = 32_000_000
"""Bytes that every node fetches."""

PATIENCE = 120.0
"""Seconds for which a node is asked."""

ARRIVALS = 120.0
"""Seconds for which workers are awaited."""

CLOCKS = 1.0
"""Seconds by which the clock of a node may differ: logs of several machines are read side by side."""

Findings = list[DoctorFinding]


def examine_cluster(config: RunConfig) -> int:
    """Prints a table for every machine. Returns 0 if a run can start, 1 if something is in its way. Raises ConfigError if there is no cluster."""
    place = config.orchestration
    if not place.elsewhere and not place.hosts:
        raise ConfigError(
            '--cluster looks at other machines, and orchestration.kind = "local" has none; set it to "ray" or "join", or scorers or environments'
        )
    check_seats(place)
    if place.joined:
        return print_findings(asyncio.run(findings_of_joining(config)))
    return print_findings(asyncio.run(findings_of(config, open_cluster(place.address))))


async def findings_of(config: RunConfig, cluster: Cluster) -> dict[str, Findings]:
    """Returns the findings by title: about the whole cluster, then about each node that could hold an engine or a rank."""
    place, ranks = config.orchestration, ranks_of(config)
    bundle = NodeShare(threads_elsewhere(config), place.gpus)
    rank = NodeShare(threads_of_rank(config), place.rank_gpus)
    engines = [f"engine {number}" for number in range(config.engine.replicas)]
    async with aclosing(cluster), sending(place.host) as (address, token):
        await cluster.open()
        nodes = await cluster.nodes()
        problems = [
            refusal(nodes, bundle, engines, cluster.address),
            refusal(nodes, rank, ranks, cluster.address),
            await reach_problem(place, cluster),
        ]
        said = [DoctorFinding("the run", "bad", one) for one in problems if one]
        room = (
            f"{sum(node.holds(bundle) for node in nodes)} engines of {bundle}; the run wants {config.engine.replicas}"
        )
        ranks_room = f"{sum(node.holds(rank) for node in nodes)} ranks of {rank}; the run wants {len(ranks)}"
        trainer = DoctorFinding(
            "trainer",
            "ok",
            ranks_room if ranks else "stays on this machine, as a child of the run (orchestration.trainer)",
        )
        found = {"Cluster": [*(said or [DoctorFinding("room", "ok", room)]), trainer]}
        terms = terms_of(config.model.path, await asyncio.to_thread(resolve_model, config.model.path))
        for node in nodes:
            if node.holds(bundle) or (ranks and node.holds(rank)):
                found[f"Node {node.address} ({node.has}), {node.id[:6]}"] = await _node(
                    cluster, node, (terms, address, token)
                )
        return found


async def findings_of_joining(config: RunConfig) -> dict[str, Findings]:
    """Waits for as many workers as the run has seats, and asks each one. Returns the findings by title."""
    place, seats = config.orchestration, seats_of(config)
    token, tls = secrets_of(place)
    terms = terms_of(config.model.path, await asyncio.to_thread(resolve_model, config.model.path))
    code = terms_of_code(config)
    found: dict[str, Findings] = {"Workers": []}
    came: Counter[Kind] = Counter()
    enough = asyncio.Event()
    away: list[str] = []
    async with sending(place.host, reached_at(config.weight_sync, config.ends)) as (address, key):

        async def examine(hello: Hello, ask: Callable[[DoctorQuestion], Awaitable[DoctorAnswer]]) -> None:
            title = f"Worker {len(found)}, {hello.kind}: {hello.host} (process {hello.pid})"
            found[title] = []
            try:
                async with asyncio.timeout(PATIENCE):
                    found[title] = await _ask(ExaminedWorker(ask), code.get(hello.kind, terms), address, key)
            except (TimeoutError, HostLost) as error:
                found[title] = [DoctorFinding("the worker", "bad", str(error) or f"did not answer in {PATIENCE:g} s")]
            came[hello.kind] += 1
            if all(came[kind] >= len(names) for kind, names in seats.items()):
                enough.set()

        listener = Listener(token, place.host, place.port, terms=terms, tls=tls, examine=examine, say=away.append)
        try:
            await listener.open()
            print(invitation(config, listener.address), file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ARRIVALS):
                    await enough.wait()
        except OSError as error:
            raise ConfigError(f"orchestration.listen = {place.listen}: {error.strerror or error}") from None
        finally:
            await listener.close()
    found["Workers"] = [
        *(_counted(kind, came[kind], len(names)) for kind, names in seats.items()),
        *(
            DoctorFinding(kind, "bad", f"{came[kind]} came; the run has no seat for it", "leave it out")
            for kind in came.keys() - seats.keys()
        ),
        *(DoctorFinding("a stranger", "note", one) for one in away),
    ]
    return found


def _counted(kind: Kind, came: int, seats: int) -> DoctorFinding:
    missing = f"start more within {ARRIVALS:g} s" if came < seats else ""
    words = f"{came} came; the run has {plural(seats, 'seat')}"
    return DoctorFinding(f"{kind} offers", "bad" if missing else "ok", words, missing)


async def _node(cluster: Cluster, node: ClusterNode, asked: tuple[Any, str, str]) -> Findings:
    try:
        async with asyncio.timeout(PATIENCE):
            hosted = await cluster.visit(node)
            try:
                return await _ask(hosted, *asked)
            finally:
                hosted.kill()
    except TimeoutError:
        return [DoctorFinding("the node", "bad", f"did not answer in {PATIENCE:g} seconds", "restart it, or remove it")]
    except HostLost as error:
        return [DoctorFinding("the node", "bad", str(error), "read Ray's logs on it")]


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
    about, fine = (
        ("model", agreed.model_dir) if terms.model else ("user code", f"the run's {plural(len(terms.files), 'file')}")
    )
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
    said = f"{abs(ahead):.3f} s {'ahead' if ahead > 0 else 'behind'} (± {unsure:.3f} s)"
    return DoctorFinding(
        "clock", "note" if far else "ok", said, "times in its logs are not the run's: use NTP" if far else ""
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
