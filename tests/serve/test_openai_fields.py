"""Fields that clients of other servers send to `headrace serve`: `echo`, seeds, several prompts, and those that nobody knows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_openai_client import ASKING, run, saying

from headrace.core.chat.token_text import text_of_bytes
from headrace.models.chat import ChatEncoder
from headrace.serve.serving import Serving
from headrace.testing.fake_engine import FakeEngine
from headrace.web.bodies import Chat
from headrace.web.errors import Refused
from headrace.web.formats.anthropic_messages import Messages
from headrace.web.formats.responses import Responses
from headrace.web.request_fields import CHANGING, HEADER, MOST_UNKNOWN, note_unknown
from support.served import Client, faked
from support.spelled_tokens import spelled
from support.tool_chats import PLAIN, save_tokenizer, tokens_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


# --- echo --------------------------------------------------------------------------------------------------------------


def opinion(tokens: Any) -> float:
    return -float(tokens[-1]) / 8


def scoring() -> FakeEngine:
    return FakeEngine(seconds_per_token=0.0005, script=lambda request: tokens_of("no</s>"), opinion=opinion)


@pytest.mark.parametrize("most", [0, 1])
def test_a_prompt_is_scored_as_lm_eval_asks_for_it(tmp_path: Path, most: int) -> None:
    """lm-eval's `local-completions` sends tokens, `echo`, `logprobs` and `max_tokens` 0 or 1, cuts off the context, and asks whether each
    token is the most probable one of its place."""

    async def case(url: str, serving: Serving) -> None:
        prompts, context = [tokens_of("ab cd"), tokens_of("xyz")], 2
        more: Any = {"max_tokens": most, "echo": True, "logprobs": 1, "seed": 1234, "temperature": 0}
        answer = await client_of(url).completions.create(model="tiny", prompt=prompts, **more)
        for choice, prompt, text in zip(answer.choices, prompts, ("ab cd", "xyz"), strict=True):
            said, sampled = choice.logprobs, "n" * most
            assert said and said.token_logprobs and said.top_logprobs and said.text_offset
            assert choice.text == text + sampled and said.tokens == [*text, *sampled]
            assert said.text_offset == list(range(len(choice.text)))
            assert said.token_logprobs[0] is None and said.top_logprobs[0] is None
            end = len(prompt)
            assert said.token_logprobs[context:end] == [opinion([token]) for token in prompt[context:]]
            pairs = zip(said.token_logprobs[context:end], said.top_logprobs[context:end], strict=True)
            assert all(one == max(top.values()) for one, top in pairs)
        assert answer.usage and answer.usage.prompt_tokens == sum(map(len, prompts))
        assert answer.usage.completion_tokens == 2 * most

    run(PLAIN, tmp_path, scoring(), case)


def test_an_echo_is_the_prompt_as_it_was_sent_and_streams(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        more: Any = {"max_tokens": 2, "echo": True, "n": 2, "prompt": ["a<s>b", "c"]}
        for logprobs in (None, 0):
            more["logprobs"] = logprobs
            whole = await client_of(url).completions.create(model="tiny", **more)
            assert [choice.text for choice in whole.choices] == ["a<s>bno"] * 2 + ["cno"] * 2
            texts, scored = [""] * 4, [list[float | None]() for _ in range(4)]
            async for event in await client_of(url).completions.create(model="tiny", stream=True, **more):
                (one,) = event.choices
                texts[one.index] += one.text
                scored[one.index] += (one.logprobs.token_logprobs or []) if one.logprobs else []
            assert texts == [choice.text for choice in whole.choices]
            own = [choice.logprobs.token_logprobs if choice.logprobs else [] for choice in whole.choices]
            assert scored == own and len(own[3] or ()) == (3 if logprobs == 0 else 0)
        only = await client_of(url).completions.create(model="tiny", prompt="c", echo=True, max_tokens=0)
        assert only.choices[0].text == "c" and only.choices[0].logprobs is None

    run(PLAIN, tmp_path, scoring(), case)


# --- seeds and several prompts -----------------------------------------------------------------------------------------


def test_a_seed_is_any_64_bit_number_and_no_two_are_one(tmp_path: Path) -> None:
    seeds = [-(1 << 63), -1, 0, 1, (1 << 63) - 1]

    async def case(url: str, serving: Serving) -> None:
        for seed in seeds:
            await client_of(url).completions.create(model="tiny", prompt="a", seed=seed, n=1)
        engine: Any = serving.engine
        used = [request.sampling.seed for request in engine.requests]
        assert len(set(used)) == len(seeds) and used[2:] == seeds[2:] and all(0 <= one < 1 << 64 for one in used)

    run(PLAIN, tmp_path, scoring(), case)


def test_a_prompt_that_is_given_twice_is_counted_twice(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        answer = await client_of(url).completions.create(model="tiny", prompt=["abc", "abc", "d"], n=3)
        assert answer.usage and answer.usage.prompt_tokens == 7 and len(answer.choices) == 9

    run(PLAIN, tmp_path, scoring(), case)


# --- fields that nobody knows ------------------------------------------------------------------------------------------


def test_an_unknown_field_is_ignored_and_the_answer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def case(url: str, serving: Serving) -> None:
        create = client_of(url).chat.completions.with_raw_response.create
        for _ in range(2):
            more: Any = {"prompt_cache_key": "a", "extra_body": {"colour": 1, "ü\r\nX: 1": 2, "use_beam_search": False}}
            options: Any = {"include_usage": True, "include_obfuscation": False, "shape": 1}
            raw = await create(model="tiny", messages=ASKING, stream=True, stream_options=options, **more)
            named = raw.headers[HEADER].split(", ")
            assert sorted(named) == [
                "%C3%BC%0D%0AX%3A%201",
                "colour",
                "prompt_cache_key",
                "stream_options.shape",
                "use_beam_search",
            ]
            assert [one async for one in raw.parse()][-1].usage
        plain = await create(model="tiny", messages=ASKING)
        assert HEADER not in plain.headers

    run(PLAIN, tmp_path, saying("a", "b", "c"), case)
    assert capsys.readouterr().err.count("a request has the field colour, which has no effect here and is ignored") == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"type": "object"}}, "guided_json is not served; leave it out"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids is not served"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is not served"),
    ({"length_penalty": 0.9}, "length_penalty is not served"),
    ({"typical_p": 0.9}, "typical_p is not served"),
    ({"use_beam_search": True}, "use_beam_search is not served"),
    ({"max_token": 3}, "there is no field max_token; did you mean max_tokens?"),
    ({"topP": 0.5}, "there is no field topP; did you mean top_p?"),
    ({"stream_options": {"includeUsage": True}}, "there is no field stream_options.includeUsage; did you mean include_usage?"),
    ({f"field{place}x": 1 for place in range(MOST_UNKNOWN + 1)}, f"more than {MOST_UNKNOWN} fields"),
]  # fmt: skip


def test_an_unknown_field_that_would_change_the_answer_is_refused_by_name(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        for more, said in REFUSED:
            with pytest.raises(openai.BadRequestError) as refusal:
                await client_of(url).chat.completions.create(model="tiny", messages=ASKING, extra_body=more)
            assert said in str(refusal.value), (more, str(refusal.value))
        assert serving.counters.completions == 0

    run(PLAIN, tmp_path, saying(), case)


ELSEWHERE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/responses", {"input": "?"}, {"seed": 1, "n": 2, "top_k": 5, "stop": "a", "max_tokens": 3}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": ASKING}, {"seed": 1, "n": 2, "response_format": {"type": "json_object"}}),
    (TEXT, {"prompt": "?", "max_tokens": 1}, {"tools": [1], "messages": ASKING}),
    (CHAT, {"messages": ASKING, "max_tokens": 1}, {"prompt": "a", "echo": True, "suffix": "b", "stop_sequences": ["a"]}),
]  # fmt: skip


def test_a_field_of_another_route_that_would_change_the_answer_is_refused_too(tmp_path: Path) -> None:
    async def go() -> None:
        async with faked(save_tokenizer(tmp_path, PLAIN), scoring()) as (client, _):
            for path, asked, more in ELSEWHERE:
                for name, value in more.items():
                    status, answer = await client.post(path, {**asked, name: value})
                    assert (status, answer["error"]["message"]) == (400, f"{name} is not served; leave it out"), (
                        path,
                        name,
                    )
                neutral = {
                    "n": 1,
                    "top_k": -1,
                    "echo": False,
                    "user": "me",
                    "presence_penalty": 0.0,
                }
                assert (await client.post(path, {**asked, **{k: v for k, v in neutral.items() if k not in asked}}))[
                    0
                ] == 200, path

    asyncio.run(go())


def test_a_server_remarks_on_a_few_names_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def case(url: str, serving: Serving) -> None:
        create = client_of(url).completions.create
        for place in range(MOST_UNKNOWN + 8):
            await create(model="tiny", prompt="a", max_tokens=1, extra_body={f"colour{place}": 1})

    run(PLAIN, tmp_path, scoring(), case)
    assert capsys.readouterr().err.count("is ignored") == MOST_UNKNOWN


@given(
    st.sampled_from(sorted(CHANGING)),
    st.sampled_from([None, False, True, 0, 1, 2, 1.5, "", "a", [], [1], {}, {"a": 1}]),
)
@settings(max_examples=200)
def test_a_field_of_the_list_passes_with_a_value_of_the_list_only(name: str, value: Any) -> None:
    read = Chat(messages=[])
    if name in Chat.__struct_fields__:
        return
    neutral = any(type(value) is type(one) and value == one for one in CHANGING[name])
    try:
        note_unknown({}, read, json.dumps({name: value}).encode())
        assert neutral
    except Refused as refused:
        assert not neutral and name in refused.message


# --- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_text_are_written_as_openai_writes_them(tmp_path: Path) -> None:
    assert text_of_bytes("ü".encode()) == "ü"
    assert text_of_bytes(b"\xf0\x9f") == r"\xf0\x9f" and text_of_bytes(b"\xf0\x9f", "bytes:") == r"bytes:\xf0\x9f"


def test_an_answer_has_the_bytes_of_parts_of_characters(tmp_path: Path) -> None:
    model = spelled(tmp_path, "byte-level")
    fox = ChatEncoder(model).encode_text("a🦊")

    async def go() -> None:
        engine = FakeEngine(seconds_per_token=0.0005, script=lambda request: fox)
        async with faked(model, engine) as (client, _):
            await said(client)

    async def said(client: Client) -> None:
        asked = {"prompt": "a", "logprobs": 0, "max_tokens": 9}
        status, answer = await client.post(TEXT, asked)
        assert status == 200, answer
        logprobs = answer["choices"][0]["logprobs"]
        assert answer["choices"][0]["text"] == "a🦊"
        assert logprobs["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "🦊".encode())]
        assert logprobs["text_offset"] == [0, 1, 1, 1, 1]
        events = [event["choices"][0] for event in await client.events(TEXT, asked)]
        assert len(events) > 2 and "".join(event["text"] for event in events) == "a🦊"
        assert [place for event in events for place in event["logprobs"]["text_offset"]] == logprobs["text_offset"]

    asyncio.run(go())


def test_an_echo_has_the_places_of_the_text_that_was_sent(tmp_path: Path) -> None:
    """A start token of the tokenizer is no part of it, special tokens that the client has written are."""
    model = spelled(tmp_path, "byte-fallback")
    answer = ChatEncoder(model).encode_text(" a日")

    async def go() -> None:
        engine = FakeEngine(seconds_per_token=0.0005, script=lambda request: answer)
        async with faked(model, engine) as (client, _):
            for prompt, text, places in (
                ("a日", "a日", [0, 1, 1, 1]),
                ("a<s>a", "a<s>a", [0, 1, 4]),
                (list(ChatEncoder(model).encode_text("a<s>a")), "aa", [0, 1, 1]),
            ):
                asked = {"prompt": prompt, "logprobs": 0, "max_tokens": 9, "echo": True}
                status, said = await client.post(TEXT, asked)
                assert status == 200, said
                choice = said["choices"][0]
                assert choice["text"] == text + "a日", "the blank before a text's first word goes with the decoder"
                new = [place + len(text) for place in (0, 1, 1, 1)]
                assert choice["logprobs"]["text_offset"] == places + new

    asyncio.run(go())


def test_a_chat_has_the_bytes_too(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        answer = await client_of(url).chat.completions.create(model="tiny", messages=ASKING, logprobs=True)
        content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
        assert [bytes(one.bytes or ()).decode() for one in content or ()] == ["o", "k", "</s>"]

    assert save_tokenizer(tmp_path, PLAIN)
    run(PLAIN, tmp_path, saying("ok"), case)


# --- special tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [None, True, False])
def test_special_tokens_are_shown_where_a_request_asks_for_them(tmp_path: Path, shown: bool | None) -> None:
    """Whole and in a stream, in both formats, with the places of tokens in the text; never the one that ends it."""
    said = "no<|im_start|>yes" if shown is False else "noyes"
    fields: dict[str, Any] = {} if shown is None else {"skip_special_tokens": shown}
    engine = FakeEngine(seconds_per_token=0.0005, script=lambda request: tokens_of("no<|im_start|>yes<|im_end|>"))

    async def case() -> None:
        async with faked(save_tokenizer(tmp_path, PLAIN), engine) as (client, _):
            body = {"prompt": "ab", "logprobs": 0, "max_tokens": 20, **fields}
            _, whole = await client.post(TEXT, body)
            events = await client.events(TEXT, {**body, "stream_options": {"continuous_usage_stats": True}})
            offsets = whole["choices"][0]["logprobs"]["text_offset"]
            assert whole["choices"][0]["text"] == "".join(one["choices"][0]["text"] for one in events) == said
            assert offsets[:4] == [0, 1, 2, said.index("yes")] and offsets[-1] == len(said)
            _, chat = await client.post(CHAT, {"messages": ASKING, **fields})
            assert chat["choices"][0]["message"]["content"] == said
            async with client.session.post(
                TEXT, json={**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
            ) as answer:
                assert answer.headers[HEADER] == "stream_options.continuous_usage_stats"

    asyncio.run(case())


@pytest.mark.parametrize("field", ["images", "image_url", "attachments"])
@pytest.mark.parametrize(
    ("kind", "where", "more"),
    [(Chat, "messages", {}), (Messages, "messages", {"max_tokens": 3}), (Responses, "input", {})],
)
def test_what_a_message_shows_beside_its_text_is_refused(kind: Any, where: str, more: Any, field: str) -> None:
    """The model would answer, and be trained, without having seen it."""

    def noted(**beside: Any) -> None:
        messages = [{"role": "user", "content": "1"}, {"role": "user", "content": "2", **beside}]
        body = json.dumps({"model": "m", where: messages, **more}).encode()
        note_unknown({}, msgspec.json.decode(body, type=kind), body)

    for nothing in ([], None, ""):
        noted(**{field: nothing})
    with pytest.raises(Refused, match=rf"{where}\[1\]\.{field} is not served: the model would not see it"):
        noted(**{field: ["aGk="]})
