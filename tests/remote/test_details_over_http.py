"""What comes with the tokens over HTTP is what comes with them in process: masks, experts, probable tokens, scores of prompts."""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path

import msgspec
import torch

from headrace.core.types import Completion, Request, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.headrace import HeadraceDialect
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world.world import FactList
from headrace.serve.config import ServeConfig
from headrace.serve.routes.generate import finite
from headrace.serve.start import make_app, opened
from headrace.weight_sync.files import Files
from headrace.weight_sync.packed import lay_out
from support.served import answering
from support.tiny_models import saved

PROMPT = (1, 3, 10, 11, 12, 13, 4)
DRAWN = Sampling(max_tokens=24, top_k=20, top_p=0.9, seed=3, ignore_eos=True)
ENGINE = EngineConfig(
    dtype="float32", device="cpu", kv_gib=0.01, context_length=200, max_running=4, exact=True, routing=True
)


def request(name: str, drawn: Sampling, prefix: tuple[int, ...] = ()) -> Request:
    return Request(name, PROMPT, drawn, prefix, top_logprobs=2, return_mask=True, return_routing=True)


def test_masks_experts_probable_tokens_and_scores_are_those_of_the_engine(tiny_tokenizer: Path, tmp_path: Path) -> None:
    model = tmp_path / "mixture"
    shutil.copytree(saved("olmoe"), model)
    shutil.copytree(tiny_tokenizer, model, dirs_exist_ok=True)
    parameters = parameters_from_dir(model, torch.float32)
    transport = Files(str(tmp_path / "weights"))
    sender = transport.sender({"": lay_out(parameters.items(), torch.float32)})

    async def go() -> None:
        config = ServeConfig(model=str(model), engine=ENGINE, name="tiny")
        facts, clock = FactList(), asyncio.get_running_loop().time
        async with (
            asyncio.timeout(500),
            opened(config, model, tmp_path / "logs") as serving,
            answering(make_app(serving, "")) as url,
        ):
            telemetry = Telemetry(facts.record, clock, Waits(facts.record, clock, 100.0, 200.0))
            remote = RemoteEngine(Connection(url), HeadraceDialect(), patience=60.0, max_deaths=1, telemetry=telemetry)
            try:
                await remote.open()
                assert remote.capabilities.masks and remote.capabilities.routing
                await remote.load(sender.send(0, parameters.items()))

                async def both(one: Request) -> Completion:
                    here, there = await serving.engine.generate(one), await remote.generate(one)
                    bare = [msgspec.structs.replace(found, spans=()) for found in (here, there)]
                    assert bare[0] == bare[1]
                    return there

                whole = await both(request("cut", DRAWN))
                assert whole.mask and whole.routing and whole.top
                assert 24 * 4 < len(whole.mask.token_ids) < 24 * 20 * 4, "top_p cuts more than top_k"
                assert whole.routing.layers == 2 and whole.routing.k == 2
                rest = await both(request("rest", DRAWN, whole.tokens[:9]))
                assert rest.tokens == whole.tokens[9:]
                await both(request("min_p", replace_drawn(min_p=0.1)))
                await both(request("one", msgspec.structs.replace(DRAWN, top_k=1)))
                scored = await both(
                    Request("scored", PROMPT, Sampling(max_tokens=0), prompt_logprobs=True, top_logprobs=2)
                )
                assert scored.prompt_logprobs and scored.prompt_top
            finally:
                await remote.close()

    asyncio.run(go())
    transport.close()


def replace_drawn(**more: float) -> Sampling:
    return msgspec.structs.replace(DRAWN, top_k=0, top_p=1.0, **more)


def test_what_json_has_no_numbers_for_arrives() -> None:
    dialect, scoring = HeadraceDialect(), Request("a", (1, 7, 8), Sampling(max_tokens=0), prompt_logprobs=True)
    ending = {"token_ids": [], "logprobs": {"content": []}, "spans": [], "finish_reason": "length"}
    rows = [None, {"7": {"logprob": None}}, {"8": {"logprob": finite(-math.inf)}}]
    by = {"version": 3, "fingerprint": "f", "mixed": False}
    heard = dialect.hear({"choices": [ending], "prompt_logprobs": rows, "prompt_version": by}, scoring)
    assert heard.scores and math.isnan(heard.scores.logprobs[0]) and heard.scores.logprobs[1] == -math.inf
