"""`headrace serve` with a real engine of random weights: whatever such a model says of itself, constrained answers have the form asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.engine.config import EngineConfig
from headrace.serve.config import ServeConfig
from headrace.serve.start import make_app, opened
from support import tool_chats
from support.native_calls import TOKENIZER, save_model
from support.served import Client, answering

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
ENGINE = EngineConfig(dtype="float32", device="cpu", kv_gib=0.05, context_length=1500, max_running=8)
ASKING = [{"role": "user", "content": "?"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "grün"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": SCHEMA}}
PAINT = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}
WAIT = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("chat"), "llama", head_dim=16, max_position_embeddings=2048)
    tokenizer = type(TOKENIZER).from_pretrained(directory)
    tokenizer.chat_template = tool_chats.HERMES
    tokenizer.save_pretrained(directory)
    return directory


@asynccontextmanager
async def serving(model: Path, logs: Path) -> AsyncIterator[Client]:
    config = ServeConfig(model=str(model), engine=ENGINE, name="tiny")
    async with (
        asyncio.timeout(500),
        opened(config, model, logs) as serving,
        answering(make_app(serving, "")) as url,
        aiohttp.ClientSession(base_url=url) as session,
    ):
        yield Client(session, url)


def served(model: Path, logs: Path, case: Callable[[Client], Awaitable[None]]) -> None:
    async def go() -> None:
        async with serving(model, logs) as client:
            await case(client)

    asyncio.run(go())


def is_painted(said: Any) -> bool:
    return set(said) == {"colour", "n"} and said["colour"] in ("red", "grün") and 0 <= said["n"] <= 99


def test_the_formats_of_all_routes(model: Path, tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        for seed in range(3):
            status, answer = await client.post(
                CHAT, {"messages": ASKING, "response_format": FORMAT, "seed": seed, "max_tokens": 300}
            )
            (choice,) = answer["choices"]
            assert (
                status == 200
                and choice["finish_reason"] == "stop"
                and is_painted(json.loads(choice["message"]["content"]))
            )
        events = await client.events(
            CHAT, {"messages": ASKING, "response_format": FORMAT, "seed": 0, "max_tokens": 300}
        )
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert is_painted(json.loads(text))
        _, answer = await client.post(
            TEXT, {"prompt": "a", "structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 40}
        )
        assert answer["choices"][0]["text"] in ("left", "right")
        _, answer = await client.post(
            TEXT, {"prompt": "a", "structured_outputs": {"regex": "[0-9]{4}"}, "max_tokens": 40}
        )
        assert answer["choices"][0]["text"].isdigit() and len(answer["choices"][0]["text"]) == 4
        _, answer = await client.post(
            "/v1/responses", {"input": "?", "text": {"format": {"type": "json_schema", **FORMAT["json_schema"]}}}
        )
        assert is_painted(json.loads(answer["output"][0]["content"][0]["text"])), answer
        _, answer = await client.post(
            CHAT, {"messages": ASKING, "response_format": {"type": "json_object"}, "max_tokens": 60}
        )
        assert answer["choices"][0]["message"]["content"].startswith("{")
        _, answer = await client.post(CHAT, {"messages": ASKING, "response_format": FORMAT, "max_tokens": 4})
        assert answer["choices"][0]["finish_reason"] == "length"

    served(model, tmp_path, case)


def test_calls_that_are_forced_and_strict_tools(model: Path, tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        async def calls(**more: Any) -> list[Any]:
            status, answer = await client.post(
                CHAT, {"messages": ASKING, "tools": [PAINT, WAIT], "max_tokens": 400, "seed": 1, **more}
            )
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert choice["finish_reason"] in (
                ["tool_calls"] if choice["message"].get("tool_calls") else ["length", "stop"]
            )
            return [one["function"] for one in choice["message"].get("tool_calls", ())]

        for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
            for one in (found := await calls(tool_choice=choice, parallel_tool_calls=False)):
                arguments = json.loads(one["arguments"])
                assert is_painted(arguments) if one["name"] == "paint" else arguments == {}
            assert len(found) == 1 and (choice == "required" or found[0]["name"] == "paint")
        await calls()  # a strict tool: text may stand for a call
        tool = {"name": "paint", "input_schema": SCHEMA}
        body = {
            "model": "tiny",
            "max_tokens": 400,
            "messages": ASKING,
            "tools": [tool],
            "tool_choice": {"type": "tool", "name": "paint"},
        }
        _, answer = await client.post("/v1/messages", body)
        assert answer["stop_reason"] == "tool_use" and is_painted(answer["content"][-1]["input"]), answer
        function = {"type": "function", **PAINT["function"]}
        _, answer = await client.post(
            "/v1/responses",
            {"input": "?", "tools": [function], "tool_choice": "required", "parallel_tool_calls": False},
        )
        (call,) = [one for one in answer["output"] if one["type"] == "function_call"]
        assert is_painted(json.loads(call["arguments"]))

    served(model, tmp_path, case)


def test_a_bias_moves_what_is_sampled_and_its_log_probs(model: Path, tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        token = TOKENIZER("z")["input_ids"][0]
        body = {"prompt": "a", "max_tokens": 5, "logprobs": 0, "ignore_eos": True, "logit_bias": {str(token): 100}}
        _, answer = await client.post(TEXT, body)
        assert (
            answer["choices"][0]["text"] == "zzzzz"
            and max(map(abs, answer["choices"][0]["logprobs"]["token_logprobs"])) < 1e-6
        )
        for wrong, said in (
            ({"z": 1}, "by token id"),
            ({"3": 1, "03": -1}, "by token id"),
            ({"3_0": 1}, "by token id"),
            ({"3": 101}, "logit_bias"),
            ({"99999": 1}, "vocabulary"),
        ):
            status, answer = await client.post(TEXT, {**body, "logit_bias": wrong})
            assert status == 400 and said in answer["error"]["message"], answer
        status, answer = await client.post(
            GENERATE, {"token_ids": [1], "sampling_params": {"logit_bias": {"3": 1}}, "return_sampling_mask": True}
        )
        assert status == 400 and "no mask can tell a trainer" in answer["error"]["message"]

    served(model, tmp_path, case)


def test_there_are_no_more_most_probable_tokens_than_were_left(model: Path, tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        one: Any = {"top_k": 1, "max_tokens": 2, "ignore_eos": True}
        _, answer = await client.post(TEXT, {**one, "prompt": "a", "logprobs": 3})
        said = answer["choices"][0]["logprobs"]
        assert [list(row.values()) for row in said["top_logprobs"]] == [[0.0], [0.0]]
        _, answer = await client.post(CHAT, {**one, "messages": ASKING, "logprobs": True, "top_logprobs": 3})
        for token in answer["choices"][0]["logprobs"]["content"]:
            assert [other["token"] for other in token["top_logprobs"]] == [token["token"]]
        _, answer = await client.post(GENERATE, {"token_ids": [5], "sampling_params": {**one, "logprobs": 3}})
        for token in answer["choices"][0]["logprobs"]["content"]:
            assert [other["token_id"] for other in token["top_logprobs"]] == [token["token_id"]]

    served(model, tmp_path, case)


def test_the_sets_of_a_constraint_travel_once(model: Path, tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        drawn = {"max_tokens": 60, "seed": 3}
        body = {
            "token_ids": [1, 2],
            "sampling_params": drawn,
            "constraint": {"kind": "regex", "text": "[a-z]{8}"},
            "stream": True,
        }
        events = await client.events(GENERATE, body)
        sets = [one for event in events for one in event["choices"][0].get("sampling_sets", ())]
        assert len(sets) == 9 and sum(bool(content) for _, content in sets) == len({name for name, _ in sets}) == 2

    served(model, tmp_path, case)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True, "type": "array"}}}}, "Unimplemented keys"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "not satisfied by any text"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 5_000_000]}}}}, "too long"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(8)]}}}}, "too large"),
    ({"structured_outputs": {"regex": "("}}, "cannot be followed"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not served"),
    ({"structured_outputs": {"choice": [1]}}, "wrong type"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "leave ignore_eos out"),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "exclude each other"),
]  # fmt: skip


def test_what_cannot_be_followed_is_a_400_and_others_are_answered_meanwhile(model: Path, tmp_path: Path) -> None:
    async def case(client: Client) -> None:
        over, slowest = asyncio.Event(), 0.0

        async def watch() -> None:
            nonlocal slowest
            while not over.is_set():
                began = time.perf_counter()
                assert (await client.get("/health"))[0] == 200
                slowest = max(slowest, time.perf_counter() - began)
                await asyncio.sleep(0.01)

        watching = asyncio.ensure_future(watch())
        for (more, said), chat in itertools.product(BAD, (True, False)):
            body = {"messages": ASKING} if chat else {"prompt": "a"}
            status, answer = await client.post(CHAT if chat else TEXT, {**body, "max_tokens": 20, **more})
            assert status == 400 and said in answer["error"]["message"], (more, answer)
        exploding = {"structured_outputs": {"regex": "(.{1,1000}){1,1000}x"}, "max_tokens": 20, "prompt": "a"}
        status, answer = await client.post(TEXT, exploding)
        assert status in (200, 400, 500), answer
        _, answer = await client.post(
            TEXT, {"prompt": "a", "structured_outputs": {"choice": ["after all"]}, "max_tokens": 40}
        )
        assert answer["choices"][0]["text"] == "after all", "the engine goes on"
        over.set()
        await watching
        assert slowest < 20, "a constraint is not compiled in the event loop"

    served(model, tmp_path, case)
