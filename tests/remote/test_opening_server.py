"""A vLLM server that opens the trainer's memory (`weight_sync.kind = "cuda_ipc"`), over the CPU's stand-in for such memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.core.errors import ConfigError, IdentityError
from headrace.core.weights import AdapterSpec
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.vllm import VllmDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.models.chat import ChatEncoder
from headrace.serve.serving import Serving
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.servers.fake_vllm import FakeVllm
from headrace.web.limits import ServerLimits
from headrace.weight_sync.cuda_ipc import CudaIpc, IpcSender
from headrace.weight_sync.packed import lay_out
from support.labelled_engine import ENDS, LENGTH, request, so_far, until
from support.served import answering

SHAPES = {"embed": (50, 6), "norm": (7,)}
MANIFESTS = {
    "": lay_out([(name, torch.empty(shape)) for name, shape in SHAPES.items()], torch.bfloat16),
    "north": lay_out([("layer.lora_A.weight", torch.empty(2, 6))], torch.bfloat16),
}
NORTH = AdapterSpec("north", 2, 4.0)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def run(model: Path, case: Callable[[RemoteEngine, FakeVllm, IpcSender], Awaitable[None]], **how: Any) -> None:
    async def go() -> None:
        fake = FakeEngine(trusts=True, seconds_per_token=0.003, length=lambda rng: LENGTH)
        serving = Serving(engine=fake, encoder=ChatEncoder(model), name="tiny", limits=ServerLimits())
        server, way = FakeVllm(serving, max_loras=2, **how), CudaIpc("cpu")
        facts, clock = FactList(), asyncio.get_running_loop().time
        telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 100.0, 200.0))
        async with asyncio.timeout(60), answering(server.app()) as url:
            dialect = VllmDialect(ENDS, 1, way.access)
            engine = RemoteEngine(Connection(url), dialect, patience=60.0, max_deaths=3, telemetry=telemetry)
            try:
                await engine.open()
                await case(engine, server, way.sender(MANIFESTS))
            finally:
                await engine.close()

    asyncio.run(go())


def test_versions_go_live_while_requests_are_under_way(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeVllm, sender: IpcSender) -> None:
        await engine.load(sender.send(0, weights(0)))
        asked = asyncio.ensure_future(engine.generate(request("a")))
        for version in (1, 2):
            had = so_far(engine, "a")
            await until(lambda had=had: so_far(engine, "a") > had + 5)  # type: ignore[misc]
            await engine.load(sender.send(version, weights(version)))
        done = await asked
        assert [(span.version, span.kv_version) for span in done.spans] == [(0, 0), (1, 1), (2, 2)]
        assert server.reloads == 3 and len(done.tokens) == LENGTH

    run(tiny_tokenizer, case)


def test_bytes_that_are_not_those_published_are_refused_and_nothing_serves(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeVllm, sender: IpcSender) -> None:
        await engine.load(sender.send(0, weights(0)))
        update = sender.send(1, weights(1))
        buffer, _ = sender._slots[""][1]
        buffer.views["norm"].view(torch.uint8)[-1] ^= 1
        with pytest.raises(IdentityError, match="published with fingerprint"):
            await engine.load(update)
        assert server.serving.paused and server.reloads == 1
        buffer.views["norm"].view(torch.uint8)[-1] ^= 1
        await engine.load(update)
        assert not server.serving.paused and server.reloads == 2

    run(tiny_tokenizer, case)


def test_a_trainer_that_has_ended_is_named(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeVllm, sender: IpcSender) -> None:
        update = sender.send(0, weights(0))
        gone = {"handle": ["/proc/0/fd/0"], "layout": ["/proc/0/fd/1"]}
        with pytest.raises(IdentityError, match="cannot be opened .*: the trainer has ended, or uses another GPU"):
            await engine.load(msgspec.structs.replace(update, where=gone))

    run(tiny_tokenizer, case)


def test_an_adapter_is_written_into_files_at_the_server(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeVllm, sender: IpcSender) -> None:
        await engine.load(sender.send(0, weights(0)))
        values = torch.full((2, 6), 3.0)
        await engine.load(sender.send(0, [("layer.lora_A.weight", values)], NORTH))
        (name,) = [name for name in server.serving.loaded if name]
        assert "north-v0" in name
        done = await engine.generate(request("a", adapter="north"))
        assert len(done.tokens) == LENGTH

    run(tiny_tokenizer, case)


def test_a_server_without_headraces_part_is_refused(tiny_tokenizer: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeVllm, sender: IpcSender) -> None:
        raise AssertionError("it is refused when it is met")

    with pytest.raises(ConfigError, match="install headrace in its environment and start it with"):
        run(tiny_tokenizer, case, absent=["transfer"])
