"""The head of a cluster: a run that loses it says so, goes on with the workers that it has, and stops in time if it does not come back.

Ray ends every process that is connected to a head which has been away for `RAY_gcs_rpc_server_reconnect_timeout_s` (60 s), without a word and wherever it is: its
nodes, the workers on them, and the run's own process (`gcs_rpc_client/rpc_client.h`). A head comes back as what it was only if it keeps its state in Redis
(docs.ray.io, "GCS Fault Tolerance").
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn, Protocol

from headrace.core.errors import StalledError
from headrace.facts.telemetry import Telemetry

LOOK = 5.0
"""Seconds between two looks at a head that answered."""

AGAIN = 1.0
"""Seconds between two looks at one that did not."""

BEFORE = 20.0
"""Seconds before the end of this process by which a run stops: it writes a checkpoint."""

LOST_HEAD = "the head of the cluster does not answer"
"""The key of the warning about it."""


class Headed(Protocol):
    """A cluster, as far as its head is concerned."""

    software: str
    head: str
    """The address of its head; empty if it has none."""
    survives: float
    """Seconds that this process lives without the head."""

    async def head_problem(self) -> str:
        """Returns why the head does not answer; empty if it does. Returns within seconds."""


async def watch_head(cluster: Headed, telemetry: Telemetry, run_dir: Path) -> NoReturn:
    """Raises StalledError, with the commands that go on, if the head stays away. Its absence is a named wait."""
    while True:
        if problem := await cluster.head_problem():
            await _until_back(cluster, telemetry, run_dir, problem)
        await asyncio.sleep(LOOK)


async def _until_back(cluster: Headed, telemetry: Telemetry, run_dir: Path, problem: str) -> None:
    since, patience = telemetry.clock(), max(0.0, cluster.survives - BEFORE)
    what = f"the head of the {cluster.software} cluster at {cluster.head}"
    telemetry.warn(
        f"{what} does not answer ({problem}): engines and ranks that are up work on, and nobody is placed; the run stops in {patience:.0f} s if it is "
        "not back",
        key=LOST_HEAD,
    )
    async with telemetry.waits.named(cluster.software, what, endless=True):
        while problem := await cluster.head_problem():
            away = telemetry.clock() - since
            if away >= patience:
                raise StalledError(
                    f"{what} has not answered for {away:.0f} s ({problem}), and {cluster.software} ends all processes of its cluster soon, this one too. Start the "
                    f"head and its nodes again, and then: headrace train --resume {run_dir}"
                )
            await asyncio.sleep(AGAIN)
    telemetry.withdraw(LOST_HEAD)
