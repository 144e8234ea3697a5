"""Constraints of requests to servers: headrace's own returns what they left, the others are asked in their own words, or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_sglang_engine
import test_vllm_engine
import torch

from headrace.core.types import Completion, Constraint, Request, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.headrace import HeadraceDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.serve.config import ServeConfig
from headrace.serve.start import make_app, opened
from headrace.weight_sync.files import Files
from headrace.weight_sync.packed import lay_out
from support.native_calls import save_model
from support.served import answering

CHOICES = Constraint("choice", '["a.b", "ac"]')


def asked(constraint: Constraint | None, name: str = "r", **more: Any) -> Request:
    return Request(name, (1, 2), Sampling(max_tokens=30, seed=3, constraint=constraint), **more)


def test_headraces_own_server_returns_the_sets_also_of_what_goes_on_from_a_prefix(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", head_dim=16)
    parameters = parameters_from_dir(model, torch.float32)
    transport = Files(str(tmp_path / "weights"))
    sender = transport.sender({"": lay_out(parameters.items(), torch.float32)})
    engine = EngineConfig(dtype="float32", device="cpu", kv_gib=0.05, context_length=200, max_running=4, exact=True)

    async def go() -> None:
        facts, clock = FactList(), asyncio.get_running_loop().time
        async with (
            asyncio.timeout(500),
            opened(ServeConfig(model=str(model), engine=engine, name="tiny"), model, tmp_path / "logs") as serving,
            answering(make_app(serving, "")) as url,
        ):
            telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 100.0, 200.0))
            remote = RemoteEngine(Connection(url), HeadraceDialect(), patience=60.0, max_deaths=1, telemetry=telemetry)
            try:
                await remote.open()
                assert remote.capabilities.constraints
                await remote.load(sender.send(0, parameters.items()))

                async def both(request: Request) -> Completion:
                    here, there = await serving.engine.generate(request), await remote.generate(request)
                    assert msgspec.structs.replace(here, spans=()) == msgspec.structs.replace(there, spans=())
                    return there

                regex = Constraint("regex", "[a-z]{6}[0-9]")
                whole = await both(asked(regex, return_mask=True))
                assert whole.mask is not None and len(whole.mask.sets) == 3 and len(whole.tokens) == 8
                rest = await both(asked(regex, "rest", prefix=whole.tokens[:2], return_mask=True))
                assert rest.tokens == whole.tokens[2:] and rest.mask is not None and len(rest.mask.sets) == 3
                with pytest.raises(ValueError, match="cannot be followed"):
                    await remote.generate(asked(Constraint("regex", "(")))
            finally:
                await remote.close()

    asyncio.run(go())
    transport.close()


REFUSED = (
    (asked(CHOICES, return_mask=True), "sampling masks"),
    (asked(CHOICES, prefix=(5,)), "from the middle of a completion on"),
    (asked(Constraint("regex", "a", after="</think>")), "from the middle of a completion on"),
    (asked(Constraint("grammar", 'start: "a"')), "a grammar of this format"),
    (Request("r", (1,), Sampling(logit_bias=((3, 1.0),))), "a bias of logits"),
)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", [{"json": "{}"}, {"regex": "[0-9]"}, {"choice": ["a.b", "ac"]}]),
        ("sglang", [("{}", None), (None, "[0-9]"), (None, r"(a\.b|ac)")]),
    ],
)
def test_other_servers_are_asked_in_their_words_or_not_at_all(
    kind: str, words: list[Any], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    constraints = [Constraint("json_schema", "{}"), Constraint("regex", "[0-9]"), CHOICES]

    async def case(engine: RemoteEngine, server: Any, directory: Path) -> None:
        for constraint, expected in zip(constraints, words, strict=True):
            await engine.generate(asked(constraint))
            sent = server.bodies[-1].sampling_params
            assert (sent.structured_outputs if kind == "vllm" else (sent.json_schema, sent.regex)) == expected
        count = len(server.bodies)
        for refused, why in REFUSED:
            with pytest.raises(ValueError, match=why):
                await engine.generate(refused)
        assert len(server.bodies) == count

    (test_vllm_engine if kind == "vllm" else test_sglang_engine).run(tiny_tokenizer, tmp_path, case)
