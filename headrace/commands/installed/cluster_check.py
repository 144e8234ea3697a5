"""`headrace doctor --cluster CONFIG`: whether every node of a run's Ray cluster has the same packages and the model, and reaches the run."""

from __future__ import annotations

import asyncio
import hmac
import importlib.metadata
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from headrace.commands.installed.doctor import DoctorFinding, print_findings
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.models.resolve import resolve_model
from headrace.orchestration.seats import check_seats, ranks_of, reach_problem, threads_elsewhere, threads_of_rank
from headrace.orchestration.workers.build import open_cluster
from headrace.orchestration.workers.joining.same_model import terms_of
from headrace.orchestration.workers.placed.cluster import Cluster, ClusterNode, Hosted, HostLost, NodeShare, refusal
from headrace.orchestration.workers.placed.host import PACKAGES
from headrace.version import __version__

SENT = 32_000_000
"""Bytes that every node fetches."""

PATIENCE = 120.0
"""Seconds for which a node is asked."""

CLOCKS = 1.0
"""Seconds by which the clock of a node may differ: logs of several machines are read side by side."""

Findings = list[DoctorFinding]


def examine_cluster(config: RunConfig) -> int:
    """Prints a table for every node. Returns 0 if a run can start, 1 if something is in its way. Raises ConfigError if there is no cluster."""
    if config.orchestration.kind != "ray":
        raise ConfigError(
            f'--cluster looks at the nodes of a Ray cluster, and orchestration.kind = "{config.orchestration.kind}"; workers that join are '
            "compared when they come"
        )
    check_seats(config.orchestration)
    return print_findings(asyncio.run(findings_of(config, open_cluster(config.orchestration.address))))


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
    agreed = await hosted.ask("agree", terms)
    found.append(DoctorFinding("model", "bad" if agreed.unable else "ok", agreed.unable or agreed.model_dir))
    problem, seconds = await hosted.ask("fetch", address, token, SENT)
    if problem:
        remedy = "let its machine reach every port of orchestration.listen's host: the run's, and that of the weights"
        return [*found, DoctorFinding("network", "bad", f"cannot reach {address}: {problem}", remedy)]
    return [*found, DoctorFinding("network", "ok", f"{SENT / seconds / 1e6:.0f} MB/s from {address}")]


def versions(there: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Compares the packages of a node with those here: engine and trainer must compute the same."""
    here = {"headrace": __version__, "Python": "{}.{}".format(*sys.version_info)}
    here |= {name: importlib.metadata.version(name) for name in PACKAGES}
    for name, ours in here.items():
        theirs = there[name] or "none"
        remedy = "" if theirs == ours else f"the run has {ours}: install the same in the environment of its Ray"
        yield DoctorFinding(name, "bad" if remedy else "ok", theirs, remedy)


def _clock(theirs: float, before: float, after: float) -> DoctorFinding:
    ahead, unsure = theirs - (before + after) / 2, (after - before) / 2
    far = abs(ahead) - unsure > CLOCKS
    said = f"{abs(ahead):.3f} s {'ahead' if ahead > 0 else 'behind'} (± {unsure:.3f} s)"
    return DoctorFinding(
        "clock", "note" if far else "ok", said, "times in its logs are not the run's: use NTP" if far else ""
    )


@asynccontextmanager
async def sending(host: str) -> AsyncIterator[tuple[str, str]]:
    """Listens for nodes and sends them bytes. Yields the address, and the token that they must know."""
    token = secrets.token_hex(16)

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if hmac.compare_digest(await reader.readexactly(len(token)), token.encode()):
                writer.write(bytes(SENT))
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(send, host, 0)
    async with server:
        where, port = server.sockets[0].getsockname()[:2]
        yield f"{where}:{port}", token
