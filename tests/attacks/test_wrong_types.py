"""Whole bodies of every route, with every value in them replaced by every kind of nonsense: refused in words, or served, and never an error of
the server."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from test_strange_questions import methods_of

from headrace.core.protocols import Limits
from headrace.core.weights import WeightUpdate
from headrace.episodes.rollout_session import Played
from headrace.models.chat import ChatEncoder
from headrace.serve.config import TrainLimits
from headrace.serve.serving import Serving
from headrace.serve.start import make_app
from headrace.serve.training.saved_weights import Store
from headrace.serve.training.tinker_routes import routes
from headrace.serve.training.tinker_service import TinkerService
from headrace.testing.fake_engine import FakeEngine
from headrace.web.limits import ServerLimits
from support import tool_chats
from support.gateway.gateway_agent import Asks, played
from support.gateway.written_turns import Model, encoder_of
from support.served import answering

RAW = "RAW:"
VALUES: list[Any] = [None, True, 0, -1, -0.0, 1.5, 1e308, 1e-320, 2**31, 2**63, 2**64, -(2**63), 10**30, "", "x"]
VALUES += ["\x00\u202e", "a" * 5000, [], [None], [[]], ["x"], {}, {"a": None}, [{}], {"type": "text"}]
VALUES += [f"{RAW}{text}" for text in ("1e400", "NaN", '"\\ud800"', "01", "1" + "0" * 400)]

SCHEMA = {"type": "object"}
TEXT = {"type": "text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA, "strict": False}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = {"role": "user", "content": [TEXT], "name": "bob"}
CALLED = [{"role": "assistant", "content": "a", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "b"}]  # fmt: skip
SHARED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3, "stop": ["q"], "stop_token_ids": [5]}
SHARED |= {"n": 1, "max_tokens": 1, "logit_bias": {"5": 1.0}}
ASKS = {
    "/v1/chat/completions": [
        {"model": "tiny", "messages": [ASKED, *CALLED], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 1},
        {
            "messages": [ASKED, {"role": "assistant", "content": "a", "reasoning_content": "b"}],
            **SHARED,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "logprobs": True,
            "top_logprobs": 1,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {},
            "priority": 0,
            "request_id": "r",
        },
    ],
    "/v1/completions": [
        {"model": "tiny", "prompt": ["a", [5, 6]], **SHARED, "echo": True, "logprobs": 1},
        {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}},
    ],
    "/v1/responses": [
        {
            "model": "tiny",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "12"},
            ],
            "instructions": "i",
            "max_output_tokens": 1,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": "medium"},
            "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": "none"},
        }
    ],
    "/v1/messages": [
        {
            "model": "tiny",
            "max_tokens": 1,
            "system": [TEXT],
            "messages": [
                {"role": "user", "content": [TEXT]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT]}]},
            ],
            "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "stop_sequences": ["q"],
            "top_k": 1,
        }
    ],
    "/inference/v1/generate": [
        {
            "token_ids": [1, 5],
            "sampling_params": {**SHARED, "logprobs": 1, "prompt_logprobs": 1, "structured_outputs": {"regex": "a+"}},
            "prefix_token_ids": [],
            "request_id": "g",
        },
        {"token_ids": [1], "constraint": {"kind": "regex", "text": "a+"}, "sampling_params": {"max_tokens": 1}},
    ],
}
"""Bodies of the routes that the gateway of agents has too."""
UPDATE = {"version": 3, "kind": "full", "fingerprint": "fake-3", "nbytes": 0, "seconds": 0.0, "where": {"path": "/absent"}}  # fmt: skip
ADAM = {"learning_rate": 0.1, "beta1": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
PARAMS = {"max_tokens": 1, "seed": 1, "stop": ["q", 5], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
MORE: dict[str, list[Any]] = {
    "/v1/messages/count_tokens": [{"model": "tiny", "messages": [{"role": "user", "content": [TEXT]}]}],
    "/inference/v1/abort_requests": [{"request_ids": ["x"]}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "/absent", "load_inplace": False}],
    "/v1/unload_lora_adapter": [{"lora_name": "a", "lora_int_id": 1}],
    "/headrace/weights": [UPDATE, UPDATE | {"adapter": {"name": "b", "rank": 2, "alpha": 2.0}}],
    "/api/v1/create_session": [{"tags": ["a"], "user_metadata": {}, "sdk_version": "1", "display_name": "d"}],
    "/api/v1/session_heartbeat": [{"session_id": "SESSION"}],
    "/api/v1/create_model": [
        {"session_id": "SESSION", "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 2, "seed": 1}}
    ],
    "/api/v1/load_weights": [{"model_id": "MODEL", "seq_id": 1, "path": "tinker://m/weights/a", "optimizer": True}],
    "/api/v1/save_weights": [{"model_id": "MODEL", "seq_id": 1, "path": "a", "ttl_seconds": 3600, "overwrite": True}],
    "/api/v1/save_weights_for_sampler": [{"model_id": "MODEL", "seq_id": 1, "sampling_session_seq_id": 1}],
    "/api/v1/optim_step": [{"model_id": "MODEL", "seq_id": 1, "adam_params": ADAM}],
    "/api/v1/weights_info": [{"tinker_path": "tinker://m/weights/a"}],
    "/api/v1/create_sampling_session": [{"session_id": "SESSION", "sampling_session_seq_id": 1, "base_model": "tiny"}],
    "/api/v1/join_sampling_session": [{"sampling_session_id": "s"}],
    "/api/v1/asample": [
        {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 5]}]},
            "sampling_params": PARAMS,
            "num_samples": 1,
            "base_model": "tiny",
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 1,
        }
    ],
    "/api/v1/retrieve_future": [{"request_id": "r"}],
    "/api/v1/cancel_future": [{"request_id": "r"}],
    "/api/v1/sessions/SESSION/finish": [{"reason": {"type": "done"}, "detail": "d"}],
}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*at, name))


def wrong(body: Any) -> Iterator[bytes]:
    for at in places(body):
        for value in VALUES:
            made = {"": copy.deepcopy(body)}
            inner: Any = made
            for name in ("", *at)[:-1]:
                inner = inner[name]
            inner[("", *at)[-1]] = value
            text = json.dumps(made[""])
            yield re.sub(rf'"{RAW}((?:[^"\\]|\\.)*)"', lambda found: json.loads(f'"{found[1]}"'), text).encode()


async def none_is_an_error_of_the_server(client: aiohttp.ClientSession, path: str, body: Any) -> None:
    for raw in wrong(body):
        async with client.post(path, data=raw, headers={"Content-Type": "application/json"}) as answer:
            said = await answer.text()
            assert answer.status < 500, (path, raw[:400], said)
            assert answer.status < 400 or json.loads(said)["error"]["message"] or answer.status == 408, (
                path,
                raw[:400],
            )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return encoder_of(tmp_path_factory.mktemp("templates"), tool_chats.TEMPLATES["hermes"])


@pytest.mark.slow
@pytest.mark.parametrize("path", [*ASKS, *MORE])
def test_no_value_of_any_body_is_an_error_of_the_server(path: str, encoder: ChatEncoder, tmp_path: Path) -> None:
    async def go() -> None:
        serving = Serving(engine=FakeEngine(seconds_per_token=0.0), encoder=encoder, name="tiny", limits=ServerLimits())
        await serving.load(WeightUpdate(version=0, kind="full", fingerprint="fake-0", nbytes=0, seconds=0.0))
        limits = TrainLimits(poll_seconds=0.01)
        door = TinkerService(serving, Store(tmp_path), limits, directory=tmp_path, places=1)
        door.trainer = NoTrainer()  # type: ignore[assignment]
        app = make_app(serving, "", routes(door))
        async with asyncio.timeout(500), answering(app) as url, aiohttp.ClientSession(base_url=url) as client:
            for body in {**ASKS, **MORE}[path]:
                async with client.post("/api/v1/create_session", json={}) as answer:
                    session = (await answer.json())["session_id"]
                asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
                await client.post("/api/v1/create_model", json=asked)
                names = json.dumps(body).replace("SESSION", session).replace("MODEL", f"{session}:train:0")
                where = path.replace("SESSION", session)
                await none_is_an_error_of_the_server(client, where, json.loads(names))
        await door.close()
        assert serving.under_way == 0

    asyncio.run(go())


BODILESS = {"/pause", "/resume", "/api/v1/{path:path}"}
BODILESS |= {
    f"/api/v1/{name}"
    for name in ("client/config", "client/dynamic_config", "telemetry", "get_info", "forward_backward")
}
"""Routes that read no body, next to nothing of it, or protobuf (`test_tinker_refusals.py`)."""


class NoTrainer:
    """A trainer that has adapters, and does nothing with them."""

    def __getattr__(self, name: str) -> Any:
        async def nothing(*given: Any) -> None:
            if name not in ("add", "remove", "spoil"):
                raise ValueError("nothing is trained here")

        return nothing


def test_every_route_with_a_body_is_tried() -> None:
    nothing: Any = None
    door: Any = SimpleNamespace(serving=SimpleNamespace(limits=None))
    posts = {path for path, methods in methods_of(make_app(nothing, "", routes(door))) if "POST" in methods}
    tried = {path.replace("SESSION", "{name}") for path in (*ASKS, *MORE)}
    assert posts - tried == BODILESS and not tried - posts


RUNS = {
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "n",
    "seed",
    "logit_bias",
    "top_logprobs",
    "echo",
    "prompt_logprobs",
}
"""Fields that a run decides: a body with them is refused whatever else it has."""


def of_an_agent(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    asked = {name: of_an_agent(value) for name, value in body.items() if name not in RUNS}
    return asked | ({"prompt": [5, 6], "logprobs": 0} if "prompt" in asked else {})


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKS)
def test_no_value_of_any_body_breaks_a_rollout(path: str, encoder: ChatEncoder) -> None:
    """The same routes at the gateway, within one rollout, which goes on."""
    model = Model(encoder, ["a<|im_end|>"] * 100_000)

    async def case(asks: Asks) -> None:
        async with aiohttp.ClientSession() as client:
            for body in map(of_an_agent, ASKS[path]):
                await none_is_an_error_of_the_server(client, f"{asks.url}{path}", body)
        await asks.chat({"role": "user", "content": "and so on"})

    assert isinstance(found := played(model, case, limits=Limits(turns=100_000)), Played), found
