"""`headrace serve` with the real engine in its process: weights from files, adapters, deaths, and the command itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.serve.config import ServeConfig
from headrace.serve.serving import Serving
from headrace.serve.start import make_app, opened
from headrace.weight_sync.files import Files
from headrace.weight_sync.packed import lay_out
from support.runs import preloaded_python
from support.served import Client, answering

GENERATE = "/inference/v1/generate"
PROMPT = [1, 3, 10, 11, 12, 13, 4]
ENGINE = EngineConfig(dtype="float32", device="cpu", kv_gib=0.01, context_length=200, max_running=4, max_adapters=1)


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    drawn = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"token_ids": PROMPT, "sampling_params": drawn, **more}


@asynccontextmanager
async def serving_tiny(model: Path, logs: Path) -> AsyncIterator[tuple[Client, Serving]]:
    config = ServeConfig(model=str(model), engine=ENGINE, name="tiny")
    async with (
        asyncio.timeout(500),
        opened(config, model, logs) as serving,
        answering(make_app(serving, "")) as url,
        aiohttp.ClientSession(base_url=url) as session,
    ):
        yield Client(session), serving


def test_weights_come_by_files_and_only_those_that_were_published(tiny_llama: Path, tmp_path: Path) -> None:
    parameters = parameters_from_dir(tiny_llama, torch.float32)
    transport = Files(str(tmp_path / "weights"))
    sender = transport.sender({"": lay_out(parameters.items(), torch.float32)})
    base = sender.send(0, parameters.items())
    other = sender.send(1, ((name, -tensor) for name, tensor in parameters.items()))

    async def go() -> None:
        async with serving_tiny(tiny_llama, tmp_path / "logs") as (client, _):

            async def load(update: Any) -> Any:
                body = {name: getattr(update, name) for name in update.__struct_fields__}
                return await client.post("/headrace/weights", body)

            own = (await client.post(GENERATE, greedy(8)))[1]["choices"][0]
            status, report = await load(other)
            assert (status, report["version"]) == (200, 1), report
            new = (await client.post(GENERATE, greedy(8)))[1]["choices"][0]
            assert new["token_ids"] != own["token_ids"]
            assert new["spans"][0]["fingerprint"] == other.fingerprint and new["weight_versions"][0]["version"] == 1
            torn = Path(base.where["path"]) / "model.safetensors"
            torn.write_bytes(torn.read_bytes()[:-1] + b"\x55")
            status, answer = await load(base)
            assert status == 409 and "published with fingerprint" in answer["error"]["message"]
            again = (await client.post(GENERATE, greedy(8)))[1]["choices"][0]
            assert again["token_ids"] == new["token_ids"], "it goes on with what it had"
            whole = sender.send(0, parameters.items())
            assert (await load(whole))[0] == 200
            back = (await client.post(GENERATE, greedy(8)))[1]["choices"][0]
            assert back["token_ids"] == own["token_ids"], "no KV of the other weights is in it"
            assert back["spans"][0]["version"] == 0

    asyncio.run(go())
    transport.close()
    assert not (tmp_path / "weights").exists()


def test_an_engine_that_is_killed_in_the_middle_costs_no_token(tiny_llama: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with serving_tiny(tiny_llama, tmp_path) as (client, serving):
            whole = (await client.post(GENERATE, greedy(150)))[1]["choices"][0]["token_ids"]
            asking = asyncio.ensure_future(client.events(GENERATE, greedy(150)))
            before = serving.counters.sampled_tokens
            while serving.counters.sampled_tokens < before + 20:
                await asyncio.sleep(0.001)
            serving.engine.kill()
            pieces = [event["choices"][0] for event in await asking]
            assert [token for piece in pieces for token in piece["token_ids"]] == whole
            assert pieces[-1]["finish_reason"] == "length"

            leaving = asyncio.ensure_future(client.post(GENERATE, greedy(190)))
            before = serving.counters.sampled_tokens
            while serving.counters.sampled_tokens < before + 5:
                await asyncio.sleep(0.001)
            leaving.cancel()
            while (stats := await serving.engine.stats()).running or stats.kv_used:
                await asyncio.sleep(0.01)

    asyncio.run(go())


def test_an_adapter_of_peft_is_served_beside_the_model(tiny_llama: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    targets = ["q_proj", "down_proj"]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()

    async def go() -> None:
        async with serving_tiny(tiny_llama, tmp_path) as (client, _):

            async def scored(**more: Any) -> list[float]:
                body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}, **more}
                rows = (await client.post(GENERATE, body))[1]["prompt_logprobs"][1:]
                return [row[str(token)]["logprob"] for row, token in zip(rows, PROMPT[1:], strict=True)]

            own = await scored()
            echo = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
            said = (await client.post("/v1/completions", echo))[1]["choices"][0]["logprobs"]
            assert said["token_logprobs"][1 : len(PROMPT)] == pytest.approx(own, abs=1e-6)
            assert (
                len(said["tokens"]) == len(said["text_offset"]) == len(PROMPT) + 1 and said["top_logprobs"][0] is None
            )
            assert said["token_logprobs"][-1] == max(said["top_logprobs"][-1].values()), "it is greedy"
            load = {"lora_name": "mine", "lora_path": str(tmp_path / "adapter")}
            assert await client.post("/v1/load_lora_adapter", load) == (
                200,
                "Success: LoRA adapter 'mine' added, version 0.",
            )
            assert await scored(model="mine") == pytest.approx(expected, abs=1e-4)
            assert expected != pytest.approx(own, abs=1e-2)
            assert (await client.post("/v1/load_lora_adapter", load))[0] == 400
            assert (await client.post("/v1/load_lora_adapter", {**load, "load_inplace": True}))[0] == 200
            status, answer = await client.post("/v1/load_lora_adapter", {**load, "lora_name": "second"})
            assert status == 400 and "no room for the adapter second" in answer["error"]["message"]
            assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "mine"}))[0] == 200
            assert await scored() == pytest.approx(own, abs=1e-5)
            answer = (await client.post("/v1/load_lora_adapter", load))[1]
            assert answer.endswith("added, version 2."), "answers name versions, and two are never one"

    asyncio.run(go())


def test_the_command_answers_and_leaves_when_it_is_told_to(tiny_llama: Path, tmp_path: Path) -> None:
    sets = ["--set", "engine.kv_gib=0.01", "--set", "engine.context_length=64"]
    process = preloaded_python.Program(
        [sys.executable, "-m", "headrace", "serve", str(tiny_llama), "--port", "0", *sets],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HEADRACE_CACHE": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:\d+)$", line.strip())
        assert found, line + process.communicate(timeout=60)[1]

        async def ask() -> None:
            async with aiohttp.ClientSession(base_url=found[1]) as session:
                client = Client(session)
                chat = {"messages": [{"role": "user", "content": "1 + 1?"}], "max_tokens": 4, "model": str(tiny_llama)}
                status, answer = await client.post("/v1/chat/completions", chat)
                assert status == 200 and answer["usage"]["completion_tokens"] <= 4

        asyncio.run(ask())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.communicate()
