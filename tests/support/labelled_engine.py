"""A remote engine against a fake of a server that labels its weights (vLLM's, SGLang's), in this process, over an engine without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from headrace.core.types import Request, Sampling
from headrace.core.weights import Manifest, WeightUpdate
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialect import Dialect
from headrace.engine.remote.dialects.sglang import SglangDialect
from headrace.engine.remote.dialects.vllm import VllmDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.models.chat import ChatEncoder
from headrace.serve.serving import Serving
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.servers.fake_sglang import FakeSglang
from headrace.testing.servers.fake_vllm import FakeVllm
from headrace.web.limits import ServerLimits
from headrace.weight_sync.files import RECORD, UpdateRecord
from support.served import answering

LENGTH = 60
ENDS = (102, 105)
"""Tokens that the fake engine does not sample."""

Fake = TypeVar("Fake")


def request(name: str, **more: Any) -> Request:
    return Request(name, (1, 7, 8), Sampling(max_tokens=LENGTH, seed=3), **more)


def update(directory: Path, version: int) -> WeightUpdate:
    """The fake engine calls weights by how many it has loaded: its own were the first."""
    path = directory / f"{version}"
    path.mkdir(exist_ok=True)
    found = WeightUpdate(
        version=version,
        kind="full",
        fingerprint=f"fake-{version + 1}",
        nbytes=0,
        seconds=0.0,
        where={"path": str(path)},
    )
    (path / RECORD).write_bytes(msgspec.json.encode(UpdateRecord(found, Manifest((), 0))))
    return found


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def so_far(engine: RemoteEngine, name: str) -> int:
    found = engine.unfinished([name]).get(name)
    return len(found.tokens) if found else 0


@dataclass(frozen=True)
class Kind(Generic[Fake]):
    """A kind of server: its fake, the dialect, and the settings of the engine behind the fake."""

    fake: Callable[..., Fake]
    dialect: Callable[[Collection[int]], Dialect]
    engine: dict[str, Any] = field(default_factory=dict)

    @asynccontextmanager
    async def served(
        self, model: Path, speed: float = 0.002, api_key: str = "", **how: Any
    ) -> AsyncIterator[tuple[str, Fake]]:
        engine = FakeEngine(seconds_per_token=speed, length=lambda rng: LENGTH, **self.engine)
        serving = Serving(engine=engine, encoder=ChatEncoder(model), name="tiny", limits=ServerLimits())
        await serving.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
        server = self.fake(serving, **how)
        async with answering(server.app(api_key)) as url:  # type: ignore[attr-defined]
            yield url, server

    def engine_at(self, url: str, token: str = "") -> RemoteEngine:
        facts, clock = FactList(), asyncio.get_running_loop().time
        telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 100.0, 200.0))
        return RemoteEngine(
            Connection(url, token), self.dialect(ENDS), patience=60.0, max_deaths=3, telemetry=telemetry
        )

    def run(
        self, model: Path, directory: Path, case: Callable[[RemoteEngine, Fake, Path], Awaitable[None]], **how: Any
    ) -> None:
        """The case begins when version 0 of the run is live."""

        async def go() -> None:
            async with asyncio.timeout(300), self.served(model, **how) as (url, server):
                engine = self.engine_at(url, how.get("api_key", ""))
                try:
                    await engine.open()
                    await engine.load(update(directory, 0))
                    await case(engine, server, directory)
                finally:
                    await engine.close()

        asyncio.run(go())


VLLM: Kind[FakeVllm] = Kind(FakeVllm, lambda ends: VllmDialect(ends, check_every=0))
SGLANG: Kind[FakeSglang] = Kind(FakeSglang, SglangDialect, {"context_length": 500})
