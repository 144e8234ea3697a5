"""The dialect of SGLang against a server that speaks as SGLang documents it, in this process, over an engine without a model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.types import Request, Sampling
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.dialects.sglang import SglangDialect, statistics
from headrace.engine.remote.remote_engine import RemoteEngine
from headrace.engine.remote.server_kind import open_control
from headrace.testing.servers.fake_sglang import FakeSglang
from support.labelled_engine import ENDS, LENGTH, SGLANG, request, so_far, until, update

served, run = SGLANG.served, SGLANG.run


def test_an_update_while_requests_stream_divides_their_tokens_exactly(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeSglang, directory: Path) -> None:
        asking = {name: asyncio.ensure_future(engine.generate(request(name))) for name in "abcd"}
        await until(lambda: min(so_far(engine, name) for name in "abcd") > 5)
        assert (await engine.load(update(directory, 1))).version == 1
        had = {name: so_far(engine, name) for name in "abcd"}
        for name, one in asking.items():
            completion = await one
            assert len(completion.tokens) == LENGTH == len(completion.logprobs) and completion.stop == "length"
            assert [(span.version, span.kv_version) for span in completion.spans] == [(0, 0), (1, 1)]
            assert had[name] == completion.spans[1].start
            _, second = (body for body in server.bodies if f".{name}." in body.rid)
            assert second.input_ids == [1, 7, 8, *completion.tokens[: had[name]]]
            assert second.sampling_params.max_new_tokens == LENGTH - had[name]
        assert not server.serving.paused and not server.dead

    run(tiny_tokenizer, tmp_path, case, speed=0.01)


def test_a_request_that_is_left_takes_no_other_with_it(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """SGLang ends all requests whose ids begin with that of one that was left: the same request, asked for again, among them."""

    async def case(engine: RemoteEngine, server: FakeSglang, directory: Path) -> None:
        dialect = SglangDialect(ENDS)
        connection = Connection(engine._connection.url)
        await dialect.look(connection, 60)
        dialect._live = engine._dialect._live  # type: ignore[attr-defined]
        bodies = [dialect.ask(request("a"), f"n.a.{number}")[1] for number in (1, 12)]
        streams = [connection.stream("/generate", body) for body in bodies]
        for stream in streams:
            await anext(stream)
        await streams[0].aclose()
        tokens = sum([len(event["output_ids"]) async for event in streams[1]])
        assert tokens > LENGTH - 5 and server.serving.counters.cancelled == 0
        await connection.close()
        await server_free(server)

    run(tiny_tokenizer, tmp_path, case, speed=0.02)


async def server_free(server: FakeSglang) -> None:
    await until(lambda: server.serving.under_way == 0)


def test_a_prompt_is_scored_and_a_request_that_has_all_its_tokens_ends(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeSglang, directory: Path) -> None:
        scored = await engine.score((1, 7, 8))
        assert scored.prompt_logprobs == (-1.0, -1.0) and scored.spans[0].version == 0 and not scored.tokens
        assert server.bodies[-1].sampling_params.max_new_tokens == 0
        asked = len(server.bodies)
        for drawn, prefix, stop in (
            (Sampling(max_tokens=LENGTH), tuple(range(1, LENGTH + 1)), "length"),
            (Sampling(max_tokens=9), (7, 105), "stop"),
            (Sampling(max_tokens=9, stop_token_ids=(7,)), (5, 7), "stop"),
        ):
            ended = await engine.generate(Request("a", (1,), drawn, prefix=prefix))
            assert (ended.stop, ended.tokens) == (stop, ()), "it had ended before, and only that was not recorded"
        assert len(server.bodies) == asked
        for drawn, stops in (
            (Sampling(max_tokens=9, stop_token_ids=(7,)), [7, 102, 105]),
            (Sampling(max_tokens=9, ignore_eos=True), []),
        ):
            await engine.generate(Request("a", (1,), drawn, prefix=(4,)))
            assert server.bodies[-1].sampling_params.stop_token_ids == stops
            assert server.bodies[-1].sampling_params.ignore_eos == drawn.ignore_eos

    run(tiny_tokenizer, tmp_path, case)


def test_what_is_drawn_from_a_part_of_the_vocabulary_has_the_log_probs_of_that_part(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    async def case(engine: RemoteEngine, server: FakeSglang, directory: Path) -> None:
        plain = await engine.generate(Request("a", (1,), Sampling(max_tokens=4)))
        assert not server.bodies[-1].return_sampling_mask and plain.logprobs == (-1.0,) * 4 and plain.mask is None
        for more in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
            cut = await engine.generate(Request("a", (1,), Sampling(max_tokens=4, **more)))
            assert server.bodies[-1].return_sampling_mask and cut.logprobs == (-1.0,) * 4
        masked = await engine.generate(Request("a", (1,), Sampling(max_tokens=4, top_p=0.9), return_mask=True))
        assert masked.mask is not None
        server.faults.add("masks_ignored")
        with pytest.raises(ConfigError, match="remove|Remove rollout.top_p"):
            await engine.generate(Request("a", (1,), Sampling(max_tokens=4, top_p=0.9)))

    run(tiny_tokenizer, tmp_path, case)


def test_what_is_not_asked_of_it_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    async def case(engine: RemoteEngine, server: FakeSglang, directory: Path) -> None:
        for refused, words in (
            (request("b", top_logprobs=3), "the most probable tokens"),
            (request("b", return_routing=True), "routing"),
            (Request("b", (1,), Sampling(stop=("x",))), "stop strings"),
            (Request("b", (1,), Sampling(ignore_eos=True, stop_token_ids=(7,))), "goes by none"),
            (Request("b", (1,) * 499, Sampling(max_tokens=9)), "maximum context length"),
        ):
            with pytest.raises(ValueError, match=words):
                await engine.generate(refused)

    run(tiny_tokenizer, tmp_path, case)


def test_adapters_are_what_the_server_has_room_for(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        for how, adapters in (
            ({}, 0),
            ({"enable_lora": True}, 8),
            ({"enable_lora": True, "max_loaded_loras": 3}, 2),
            ({"enable_lora": True, "max_loaded_loras": 1}, 0),
        ):
            async with served(tiny_tokenizer, **how) as (url, _):
                connection = Connection(url)
                can = (await SglangDialect(ENDS).look(connection, 60)).capabilities
                await connection.close()
                assert (can.context_length, can.adapters, can.masks, can.spans) == (500, adapters, True, True)
                assert not (
                    can.stop_strings or can.exact or can.forks or can.routing or can.streamed or can.top_logprobs
                )

    asyncio.run(go())


GOOD = {"rid": "a", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
BAD: list[tuple[str, Any]] = [
    ("/generate", {**GOOD, "token_ids": [1]}),
    ("/generate", {**GOOD, "sampling_params": {"max_tokens": 1}}),
    ("/generate", {**GOOD, "sampling_params": {"top_k": -2}}),
    ("/generate", {**GOOD, "input_ids": []}),
    ("/pause_generation", {"mode": "keep"}),
    ("/update_weights_from_disk", {"path": "/nowhere"}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/load_lora_adapter", {"name": "a", "path": "/nowhere"}),
    ("/unload_lora_adapter", {"lora_name": "nobody"}),
    ("/update_weight_version", {"weight_version": "7"}),
]


def test_a_field_that_sglang_has_not_is_refused_by_the_fake(tiny_tokenizer: Path) -> None:
    async def go() -> None:
        async with served(tiny_tokenizer) as (url, _):
            connection = Connection(url)
            await connection.post("/generate", GOOD, 60)
            for path, body in BAD:
                with pytest.raises(ValueError):
                    await connection.post(path, body, 60)
            await connection.close()

    asyncio.run(go())


def test_weights_that_are_read_beside_requests_end_the_fake(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """As they end SGLang's scheduler: a client that does not abort first is found out."""

    async def go() -> None:
        async with served(tiny_tokenizer, speed=0.01) as (url, server):
            connection = Connection(url)
            asking = asyncio.ensure_future(connection.post("/generate", {**GOOD, "sampling_params": {}}, 60))
            await until(lambda: server.serving.under_way == 1)
            path = str(update(tmp_path, 0).where["path"])
            with pytest.raises(ValueError, match="not paused"):
                await connection.post("/update_weights_from_disk", {"model_path": path}, 60)
            await connection.post("/pause_generation", {"mode": "in_place"}, 60)
            for _ in range(2):
                with pytest.raises(HeadraceError):
                    await connection.post("/update_weights_from_disk", {"model_path": path}, 60)
            assert server.dead
            await server.serving.resume()
            await asking
            await connection.close()

    asyncio.run(go())


def test_statistics_are_summed_over_schedulers() -> None:
    text = '# HELP\nsglang:num_running_reqs{dp="0"} 2.0\nsglang:num_running_reqs{dp="1"} 1.0\nsglang:generation_tokens_total{dp="0"} 7.0\n'
    assert (statistics(text).running, statistics(text).sampled_tokens, statistics("").running) == (3, 7, 0)


@pytest.mark.parametrize("key", ["", "secret"])
def test_a_server_that_others_reach_is_warned_of_if_it_has_no_key(key: str, tiny_tokenizer: Path) -> None:
    async def go() -> None:
        async with served(tiny_tokenizer, api_key=key) as (url, _):
            stranger = Connection(url)
            answer = await open_control("sglang", "http://10.1.2.3:1", stranger, 60)
            assert ("start SGLang with --api-key" in answer) == (not key)
            assert not await open_control("sglang", "http://127.0.0.1:1", stranger, 60)
            assert not await open_control("headrace", "http://10.1.2.3:1", stranger, 60)
            await stranger.close()

    asyncio.run(go())
