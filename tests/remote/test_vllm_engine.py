"""The dialect of vLLM, against a server that takes what vLLM 0.32 documents and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.core.types import Request, Sampling
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.vllm import VllmDialect, statistics
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.engine.remote.server_kind import open_control
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.servers.fake_vllm import FakeVllm
from support.labelled_engine import ENDS, LENGTH, VLLM, request, so_far, until, update

served, run = VLLM.served, VLLM.run


def test_an_update_while_requests_stream_divides_their_tokens_exactly(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeVllm, directory: Path) -> None:
        asking = {name: asyncio.ensure_future(engine.generate(request(name))) for name in "abcd"}
        await until(lambda: min(so_far(engine, name) for name in "abcd") > 5)
        report = await engine.load(update(directory, 1))
        had = {name: so_far(engine, name) for name in "abcd"}
        assert report.version == 1
        for name, one in asking.items():
            completion = await one
            assert len(completion.tokens) == LENGTH == len(completion.logprobs) and completion.stop == "length"
            assert [(span.version, span.kv_version) for span in completion.spans] == [(0, 0), (1, 1)]
            assert had[name] == completion.spans[1].start
            first, second = (body for body in server.bodies if f".{name}." in body.request_id)
            assert second.token_ids == [1, 7, 8, *completion.tokens[: had[name]]]
            assert second.sampling_params.max_tokens == LENGTH - had[name]
            assert first.cache_salt != second.cache_salt, "no KV of older weights for a request of the new ones"
        assert not server.serving.paused

    run(tiny_tokenizer, tmp_path, case, speed=0.01)


def test_a_prompt_is_scored_and_a_request_that_has_all_its_tokens_ends(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeVllm, directory: Path) -> None:
        scored = await engine.score((1, 7, 8))
        assert scored.prompt_logprobs == (-1.0, -1.0) and scored.spans[0].version == 0 and not scored.tokens
        whole = await engine.generate(request("a", prefix=tuple(range(1, LENGTH + 1))))
        assert whole.stop == "length" and not whole.tokens
        asked = len(server.bodies)
        for drawn, prefix in (
            (Sampling(max_tokens=9), (7, 105)),
            (Sampling(max_tokens=9, stop_token_ids=(7,)), (5, 7)),
        ):
            ended = await engine.generate(Request("a", (1,), drawn, prefix=prefix))
            assert ended.stop == "stop" and not ended.tokens, (
                "its end was sampled before, and only that was not recorded"
            )
        assert len(server.bodies) == asked
        for drawn, stops in (
            (Sampling(max_tokens=9, stop_token_ids=(7,)), [7, 102, 105]),
            (Sampling(ignore_eos=True), []),
        ):
            await engine.generate(Request("a", (1,), drawn, prefix=(4,)))
            assert server.bodies[-1].sampling_params.stop_token_ids == stops
            assert server.bodies[-1].sampling_params.ignore_eos, (
                "vLLM goes by the tokens that are named, and by no others"
            )
        for more in ({"return_mask": True}, {"top_logprobs": 3}, {"return_routing": True}):
            with pytest.raises(ValueError, match="vLLM is not asked for"):
                await engine.generate(request("b", **more))

    run(tiny_tokenizer, tmp_path, case)


def test_adapters_need_their_routes(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        for how, adapters in (({"max_loras": 2}, 2), ({"max_loras": 2, "absent": ["lora"]}, 0), ({}, 0)):
            async with served(tiny_tokenizer, **how) as (url, _):
                connection = Connection(url)
                state = await VllmDialect(ENDS, check_every=0).look(connection, 60)
                await connection.close()
                can = state.capabilities
                assert can.context_length == FakeEngine().context_length - 1, (
                    "behind a scored prompt one token is sampled"
                )
                assert (can.adapters, can.masks, can.stop_strings, can.exact, can.forks) == (adapters, *[False] * 4)

    asyncio.run(go())


def test_a_field_that_vllm_has_not_is_refused_by_the_fake(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        async with served(tiny_tokenizer) as (url, _):
            connection = Connection(url)
            good = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
            await connection.post("/inference/v1/generate", good, 60)
            for bad in ({**good, "prefix_token_ids": [2]}, {**good, "sampling_params": {"max_tokens": 0}}):
                with pytest.raises(ValueError, match="not what this route takes"):
                    await connection.post("/inference/v1/generate", bad, 60)
            await connection.close()

    asyncio.run(go())


def test_statistics_are_summed_over_engines() -> None:
    text = '# HELP\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\nvllm:generation_tokens_total{engine="0"} 7.0\n'
    assert (statistics(text).running, statistics(text).sampled_tokens) == (3, 7)


def test_a_server_that_others_reach_is_warned_of_if_its_control_routes_are_open(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        for absent, is_open in (([], True), (["dev"], False)):
            async with served(tiny_tokenizer, api_key="secret", absent=absent) as (url, _):
                stranger = Connection(url)
                for other in ("http://8.8.8.8:1", "http://10.1.2.3:1", "http://gpu.example.com:1"):
                    answer = await open_control("vllm", other, stranger, 60)
                    assert (
                        "answer without a token" in answer and "--api-key does not change that" in answer
                    ) == is_open
                for here in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
                    assert not await open_control("vllm", here, stranger, 60)
                await stranger.close()

    asyncio.run(go())
