"""`headrace serve` over the engine without a model: what each route answers, and what becomes of those who leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from headrace.core.chat.token_text import StreamedText
from headrace.core.errors import IdentityError
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Completion, Request
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.serve.serving import Serving, follow
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.makers import request
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from support.served import Client, by_name, faked

Case = Callable[[Client, Serving], Awaitable[None]]
LONGEST = 300
GENERATE = "/inference/v1/generate"
TOKENS = {"token_ids": [1, 7, 8], "sampling_params": {"max_tokens": 6, "seed": 5, "logprobs": 0}}


def run(model: Path, case: Case, engine: FakeEngine | None = None, **settings: Any) -> None:
    async def go() -> None:
        async with asyncio.timeout(LONGEST), faked(model, engine, **settings) as (client, serving):
            await case(client, serving)
            assert serving.under_way == 0, "everything was released"

    asyncio.run(go())


def lasting(tokens: int = 10_000) -> FakeEngine:
    return FakeEngine(seconds_per_token=0.002, length=lambda rng: tokens, context_length=100_000)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def test_a_client_that_leaves_when_its_answer_is_complete_leaves_nothing(tiny_tokenizer: Path) -> None:
    """The task that follows it is cancelled while it releases the request."""

    async def case(client: Client, serving: Serving) -> None:
        async def take() -> None:
            async with aclosing(follow(serving, [request("r", (1, 7, 8), 3)])) as pieces:
                async for piece in pieces:
                    if piece.ended:
                        taking.cancel()

        taking = asyncio.ensure_future(take())
        with pytest.raises(asyncio.CancelledError):
            await taking

    run(tiny_tokenizer, case)


# --- tokens in, tokens out ---------------------------------------------------------------------------------------------


def test_a_stream_has_the_tokens_of_the_whole_answer_and_each_its_version(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        status, whole = await client.post(GENERATE, {**TOKENS, "request_id": "same"})
        (choice,) = whole["choices"]
        assert status == 200 and whole["request_id"] == "same" and choice["finish_reason"] in ("stop", "length")
        events = await client.events(GENERATE, {**TOKENS, "request_id": "same"})
        pieces = [event["choices"][0] for event in events]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"] != []
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(choice["token_ids"])}]
        assert choice["spans"] == [{"start": 0, "version": 0, "kv_version": 0, "mixed": False, "fingerprint": "fake-0"}]
        assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"]
        assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])

    run(tiny_tokenizer, case, FakeEngine(seconds_per_token=0.001, script=by_name))


def test_versions_are_those_of_who_loaded_them_also_when_they_begin_anew(tiny_tokenizer: Path) -> None:
    """A second run's version 0 comes after the first one's version 7, and no token is ascribed to the wrong one."""

    async def case(client: Client, serving: Serving) -> None:
        async def loaded(version: int, fingerprint: str) -> Any:
            update = {"version": version, "kind": "full", "fingerprint": fingerprint, "nbytes": 0, "seconds": 0}
            return await client.post("/headrace/weights", {**update, "where": {"path": "/nowhere"}})

        status, report = await loaded(7, "fake-1")
        assert (status, report["version"]) == (200, 7)
        assert (await loaded(7, "fake-1"))[1] == report, "asked again, it is not loaded again"
        asking = asyncio.ensure_future(client.events(GENERATE, {**TOKENS, "sampling_params": {"max_tokens": 40}}))
        await until(lambda: serving.counters.sampled_tokens > 3)
        assert (await loaded(0, "fake-2"))[0] == 200
        events = await asking
        versions = [span["version"] for event in events for span in event["choices"][0]["spans"]]
        prints = {span["version"]: span["fingerprint"] for event in events for span in event["choices"][0]["spans"]}
        assert versions == sorted(versions, reverse=True) and prints == {7: "fake-1", 0: "fake-2"}
        status, refused = await loaded(1, "torn")
        assert status == 409 and "was published as torn" in refused["error"]["message"]
        assert (await client.get("/headrace/state"))[1]["weights"] == {"version": 0, "fingerprint": "fake-2"}

    run(tiny_tokenizer, case, FakeEngine(seconds_per_token=0.02, length=lambda rng: 40))


def test_base_weights_over_which_adapters_are_trained_stay(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        serving.trained = True
        update = {"version": 1, "kind": "full", "fingerprint": "fake-1", "nbytes": 0, "seconds": 0}
        status, answer = await client.post("/headrace/weights", {**update, "where": {"path": "/nowhere"}})
        assert status == 409 and "one that runs without --train" in answer["error"]["message"]
        assert (await client.get("/headrace/state"))[1]["weights"]["fingerprint"] == "fake-0"

    run(tiny_tokenizer, case)


def test_a_prefix_is_gone_on_from_and_a_prompt_is_scored(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        whole = (await client.post(GENERATE, {**TOKENS, "request_id": "r"}))[1]["choices"][0]["token_ids"]
        rest = await client.post(GENERATE, {**TOKENS, "request_id": "r", "prefix_token_ids": whole[:2]})
        assert rest[1]["choices"][0]["token_ids"] == whole[2:]
        scoring = {"token_ids": [1, 7, 8], "sampling_params": {"max_tokens": 0, "prompt_logprobs": 2}}
        for answer in ((await client.post(GENERATE, scoring))[1], (await client.events(GENERATE, scoring))[0]):
            assert answer["prompt_version"] == {"version": 0, "fingerprint": "fake-0", "mixed": False}
            first, *rows = answer["prompt_logprobs"]
            assert first is None and [row[token]["logprob"] for row, token in zip(rows, "78", strict=True)] == [-1, -1]

    run(tiny_tokenizer, case, FakeEngine(seconds_per_token=0.001, script=by_name))


# --- text --------------------------------------------------------------------------------------------------------------


def test_chat_and_completions_in_pieces_are_what_they_are_whole(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "7 + 7?"}], "seed": 3, "max_tokens": 20}
        chat |= {"logprobs": True, "request_id": "c"}
        status, whole = await client.post("/v1/chat/completions", chat)
        assert status == 200 and whole["object"] == "chat.completion", whole
        message = whole["choices"][0]["message"]
        events = await client.events("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}})
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta["content"] for delta in deltas) == message["content"]
        assert deltas[0]["role"] == message["role"] == "assistant" and "role" not in deltas[1]
        assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
        assert len(whole["choices"][0]["logprobs"]["content"]) == whole["usage"]["completion_tokens"]

        plain = {"model": "tiny", "prompt": ["1+1", [7, 8]], "n": 2, "max_tokens": 9, "logprobs": 0, "request_id": "p"}
        status, whole = await client.post("/v1/completions", plain)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        texts = ["", "", "", ""]
        for event in await client.events("/v1/completions", plain):
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]

    run(tiny_tokenizer, case, FakeEngine(seconds_per_token=0.001, script=by_name))


def test_text_ends_at_a_stop_string_and_never_shows_a_part_of_it() -> None:
    def decode(tokens: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    message = "grüße an alle ENDE und mehr".encode()
    for size in range(1, 9):
        for stops, expected in (((), message.decode()), (("ENDE",), "grüße an alle "), (("NIE",), message.decode())):
            text, pieces = StreamedText(decode, stops), []
            for at in range(0, len(message), size):
                pieces.append(text.push(message[at : at + size], last=at + size >= len(message)))
            assert "".join(pieces) == text.whole == expected
            assert not any("\ufffd" in piece for piece in pieces)


# --- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, int, str]] = [
    (GENERATE, {"token_ids": []}, 400, "token_ids is empty"),
    (GENERATE, {"token_ids": [1], "colour": 1}, 400, "unknown field `colour`"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt mixes tokens and texts"),
    (GENERATE, {"token_ids": ["a"]}, 400, r"Expected `int`, got `str` - at `$.token_ids[0]`"),
    (GENERATE, {"token_ids": [1], "model": "other"}, 404, "there is no model other here; there are: tiny"),
    (GENERATE, {"token_ids": [1] * 99}, 400, "shorten it"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 64}}, 400, "leaves room for 63"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"seed": 1 << 63}}, 400, "seed"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"colour": 1}}, 400, "unknown field `colour`"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"n": 1000}}, 400, "may ask for 128"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"frequency_penalty": 1.5}}, 400, "frequency_penalty is not served"),
    ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "no tokens"),
    ("/v1/completions", {"model": "tiny", "prompt": []}, 400, "prompt is an empty list"),
    ("/v1/completions", {"model": "tiny", "prompt": [[], [1]]}, 400, "no tokens"),
    ("/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user"}]}, 404, "there is no model nobody"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "missing required field `function`"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "a run shows images"),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, 400, "is not an adapter that peft saved"),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}, 404, "no adapter a is loaded"),
    ("/headrace/weights", {"version": 1}, 400, "missing required field"),
    ("/pause?mode=sideways", {}, 400, "choose keep, wait, abort"),
    ("/v2/completions", {}, 404, "/v2/completions is not served here; did you mean /v1/completions"),
    ("/chat/completions", {}, 404, "did you mean /v1/chat/completions"),
    ("/v1/embeddings", {}, 404, "/v1/embeddings is not served here"),
    ("/v1/models", {}, 405, "/v1/models takes GET, HEAD, not POST"),
]  # fmt: skip


def test_what_cannot_be_is_refused_with_a_sentence(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        for path, body, expected, words in REFUSED:
            status, answer = await client.post(path, body)
            assert (status, words in answer["error"]["message"]) == (expected, True), (path, body, answer)
            assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")
        for text in ("", "{", "[1]", '{"token_ids": [NaN]}', '{"token_ids": [1]} x', "[" * 100_000):
            status, answer = await client.post(GENERATE, data=text, headers={"Content-Type": "application/json"})
            assert status == 400 and "not what this route takes" in answer["error"]["message"]
        status, answer = await client.post(GENERATE, data="{}", headers={"Content-Type": "text/plain"})
        assert status == 415
        assert (await client.get(GENERATE))[0] == 405
        full = {"token_ids": [1] * 64, "sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}}
        assert (await client.post(GENERATE, full))[0] == 200, "a prompt that fills the context can be scored"
        streamed = await client.post(GENERATE, {"token_ids": [1] * 99, "stream": True})
        assert streamed[0] == 400, "a refusal of a stream has its own status too"
        assert serving.counters.completions == 1

    run(tiny_tokenizer, case, FakeEngine(context_length=64))


def test_too_much_is_refused_and_room_is_found_again(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        status, answer = await client.post(GENERATE, {"token_ids": [1] * 3000})
        assert status == 413 and "2000 bytes" in answer["error"]["message"]

        async def endless() -> Any:
            while True:  # without a Content-Length
                yield b" " * 500
                await asyncio.sleep(0)

        status, _ = await client.post(GENERATE, data=endless(), headers={"Content-Type": "application/json"})
        assert status == 413
        two = [asyncio.ensure_future(client.post(GENERATE, long())) for _ in range(2)]
        await until(lambda: serving.under_way == 2)
        status, answer = await client.post(GENERATE, long())
        assert status == 503 and answer["error"]["code"] == "busy"
        assert (await client.get("/health"))[0] == 200
        await client.post("/inference/v1/abort_requests", {})
        assert {status for status, _ in await asyncio.gather(*two)} == {200}
        assert (await client.post(GENERATE, {**TOKENS, "sampling_params": {"max_tokens": 1}}))[0] == 200

    run(tiny_tokenizer, case, lasting(), limits=ServerLimits(body_bytes=2000, requests=2))


def test_a_body_that_does_not_come_is_not_waited_for(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        async def slow() -> Any:
            yield b"{"
            await asyncio.sleep(1000)

        status, answer = await client.post(GENERATE, data=slow(), headers={"Content-Type": "application/json"})
        assert status == 408 and "did not arrive" in answer["error"]["message"]

    run(tiny_tokenizer, case, limits=ServerLimits(body_seconds=0.2))


def long() -> dict[str, Any]:
    return {"token_ids": [1, 2], "sampling_params": {"max_tokens": 10_000}}


# --- those who leave ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_the_request_of_a_client_that_leaves_ends(tiny_tokenizer: Path, stream: bool) -> None:
    async def case(client: Client, serving: Serving) -> None:
        engine = serving.engine
        asking = [asyncio.ensure_future(client.post(GENERATE, {**long(), "stream": stream})) for _ in range(3)]
        await until(lambda: len(engine.unfinished()) == 3 and serving.counters.sampled_tokens > 10)
        for one in asking[1:]:
            one.cancel()
        await until(lambda: len(engine.unfinished()) == 1)
        assert serving.counters.cancelled == 2, "and nothing else of it is left"
        await client.post("/inference/v1/abort_requests", {})
        await asking[0]

    run(tiny_tokenizer, case, lasting())


def test_half_of_many_clients_vanish_and_the_others_get_what_they_would_have(tiny_tokenizer: Path) -> None:
    body = {"token_ids": [1, 7, 8], "sampling_params": {"max_tokens": 50, "seed": 1}}

    async def case(client: Client, serving: Serving) -> None:
        alone = {}
        for number in range(100):
            alone[number] = (await client.post(GENERATE, {**body, "request_id": f"r{number}"}))[1]["choices"]
        await client.post("/pause?mode=keep")
        asking = {
            number: asyncio.ensure_future(client.post(GENERATE, {**body, "request_id": f"r{number}"}))
            for number in range(100)
        }
        await until(lambda: serving.under_way == 100)
        for number in range(1, 100, 2):
            asking[number].cancel()
        await until(lambda: serving.under_way == 50)
        await client.post("/resume")
        for number in range(0, 100, 2):
            assert (await asking[number])[1]["choices"] == alone[number]
        await until(lambda: serving.under_way == 0)

    run(tiny_tokenizer, case, FakeEngine(seconds_per_token=0.002, script=by_name))


class Late(FakeEngine):
    """An engine in another process: it hears of a cancellation late, and has said more meanwhile."""

    async def generate(self, request: Request) -> Completion:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            late = StepOutput(0, (request.id,), (77,), (-1.0,), (0,), (Finished(request.id, "length"),))
            for later in (0.0, 0.02, 0.04):
                asyncio.get_running_loop().call_later(later, self._tell, late)
            raise


def test_a_request_that_is_sent_again_has_nothing_of_the_one_whose_client_left(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        body = {"token_ids": [1, 7, 8], "sampling_params": {"max_tokens": 50}, "request_id": "again"}
        alone = (await client.post(GENERATE, body))[1]["choices"][0]["token_ids"]
        leaving = asyncio.ensure_future(client.post(GENERATE, body))
        await until(lambda: serving.counters.sampled_tokens > len(alone) + 2)
        leaving.cancel()
        await until(lambda: serving.under_way == 0)
        assert (await client.post(GENERATE, body))[1]["choices"][0]["token_ids"] == alone

    run(tiny_tokenizer, case, Late(seconds_per_token=0.02, script=by_name))


def test_a_name_that_is_in_use_is_refused_and_one_like_it_is_not(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        body = {"token_ids": [1, 7, 8], "sampling_params": {"max_tokens": 10_000}}
        asking = asyncio.ensure_future(client.post(GENERATE, {**body, "request_id": "r"}))
        await until(lambda: serving.under_way == 1)
        status, answer = await client.post(GENERATE, {**body, "request_id": "r"})
        assert status == 400 and "a request r#0 is under way already" in answer["error"]["message"]
        more = {**body, "sampling_params": {"max_tokens": 1}}
        for name in ("r#0", "r#0.0", "r."):
            assert (await client.post(GENERATE, {**more, "request_id": name}))[0] == 200
        assert (await client.post("/inference/v1/abort_requests", {"request_ids": ["r"]}))[1] == {"aborted": ["r"]}
        assert (await asking)[1]["choices"][0]["finish_reason"] == "abort"

    run(tiny_tokenizer, case, lasting())


# --- control -----------------------------------------------------------------------------------------------------------


def test_pauses_keep_abort_and_wait(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        async def begun(tokens: int = 60) -> asyncio.Future[Any]:
            before = serving.counters.sampled_tokens
            asking = asyncio.ensure_future(client.post(GENERATE, {**TOKENS, "sampling_params": {"max_tokens": tokens}}))
            await until(lambda: serving.counters.sampled_tokens > before + 3)
            return asking

        asking = await begun()
        assert (await client.post("/pause?mode=keep"))[0] == 200
        assert (await client.get("/is_paused"))[1] == {"is_paused": True}
        before = serving.counters.sampled_tokens
        await asyncio.sleep(0.1)
        assert serving.counters.sampled_tokens <= before + 1 and not asking.done()
        await client.post("/resume")
        assert len((await asking)[1]["choices"][0]["token_ids"]) == 60

        asking = await begun(10_000)
        await client.post("/pause?mode=abort")
        (choice,) = (await asking)[1]["choices"]
        assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) > 3
        await client.post("/resume")

        asking = await begun()
        await client.post("/pause?mode=wait")
        assert len((await asking)[1]["choices"][0]["token_ids"]) == 60, "it had ended when the pause was answered"
        late = asyncio.ensure_future(client.post(GENERATE, TOKENS))
        await until(lambda: serving.under_way == 1)
        await asyncio.sleep(0.05)
        assert not late.done()
        await client.post("/resume")
        assert (await late)[0] == 200

    run(tiny_tokenizer, case, FakeEngine(seconds_per_token=0.005, length=lambda rng: 10_000))


def test_a_pause_that_another_client_has_ended_is_not_confirmed(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        asking = asyncio.ensure_future(client.post(GENERATE, {**TOKENS, "sampling_params": {"max_tokens": 60}}))
        await until(lambda: serving.counters.sampled_tokens > 3)
        pausing = asyncio.ensure_future(client.post("/pause?mode=wait"))
        await until(lambda: serving.paused == "wait")
        assert (await client.post("/resume"))[0] == 200
        status, answer = await pausing
        assert status == 409 and "another request has resumed" in answer["error"]["message"]
        assert (await client.get("/is_paused"))[1] == {"is_paused": False} and (await asking)[0] == 200

    run(tiny_tokenizer, case, FakeEngine(seconds_per_token=0.005, length=lambda rng: 10_000))


def test_adapters_come_and_go_and_one_in_use_stays(tiny_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")

    async def case(client: Client, serving: Serving) -> None:
        update = WeightUpdate(
            version=3, kind="adapter", fingerprint="fake-1", nbytes=0, seconds=0.0, adapter=AdapterSpec("math", 4, 8.0)
        )
        await serving.load(update)
        models = (await client.get("/v1/models"))[1]["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("tiny", None), ("math", "tiny")]
        assert models[0]["max_model_len"] == 100_000
        asking = asyncio.ensure_future(client.post(GENERATE, {**long(), "model": "math"}))
        await until(lambda: serving.counters.sampled_tokens > 3)
        status, answer = await client.post("/v1/unload_lora_adapter", {"lora_name": "math"})
        assert status == 409 and "in use" in answer["error"]["message"]
        await client.post("/inference/v1/abort_requests", {"request_ids": ["nobody"]})
        assert not asking.done()
        await client.post("/inference/v1/abort_requests", {})
        choice = (await asking)[1]["choices"][0]
        assert {span["version"] for span in choice["spans"]} == {3}
        assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "math"}))[0] == 200
        assert (await client.post(GENERATE, {**TOKENS, "model": "math"}))[0] == 404
        status, answer = await client.post("/v1/load_lora_adapter", {"lora_name": "peft", "lora_path": str(tmp_path)})
        assert status == 409 and "was published as" in answer["error"]["message"], "a fake loads what is called fake"
        both = await asyncio.gather(*(serving.load_adapter("two", tmp_path) for _ in range(2)), return_exceptions=True)
        assert [type(one) for one in both] == [IdentityError, Refused], "each would have been version 0"
        assert "another request loads an adapter two" in str(both[1])

    run(tiny_tokenizer, case, lasting())


def test_metrics_are_prometheus_text(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        await client.post(GENERATE, TOKENS)
        status, text = await client.get("/metrics")
        rows = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
        assert status == 200 and rows["headrace_completions_total"] == "1" and rows["headrace_weights_version"] == "0"
        assert int(rows["headrace_generation_tokens_total"]) > 0
        assert text.count("# TYPE ") == len(rows)

    run(tiny_tokenizer, case)


def test_an_engine_that_fails_a_request_says_so(tiny_tokenizer: Path) -> None:
    async def case(client: Client, serving: Serving) -> None:
        status, answer = await client.post(GENERATE, TOKENS)
        assert status == 200 and answer["choices"][0]["finish_reason"] == "error"
        assert answer["choices"][0]["error"] == "injected failure"
        for path, body in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            status, answer = await client.post(f"/v1/{path}", body)
            assert status == 500 and answer["error"]["message"] == "the completion has failed: injected failure"
            assert (await client.events(f"/v1/{path}", body))[-1]["error"]["code"] == "engine_error"

    run(tiny_tokenizer, case, FakeEngine(failure_rate=1.0, length=lambda rng: random.Random(0).randint(1, 3)))
