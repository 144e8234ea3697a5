"""`/v1/responses`, `/v1/messages` and `/v1/models/{id}` of `headrace serve`, driven by the official clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from test_openai_client import ARGUMENTS, ASKING, CALLS, WEATHER, prompt_of, run, saying

from headrace.core.chat.messages import Message
from headrace.serve.serving import Serving
from headrace.testing.fake_engine import FakeEngine
from headrace.web.errors import Refused
from headrace.web.formats.responses import StoredResponses
from support.served import faked
from support.tool_chats import GEMMA, PLAIN, TEMPLATES, save_tokenizer, tokens_of

HERMES = TEMPLATES["hermes"]
FUNCTION: Any = {"type": "function", "strict": None, **WEATHER["function"]}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": WEATHER["function"]["parameters"],
}
QUESTION: Any = [{"role": "user", "content": "How is the weather in Paris?"}]


def openai_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def anthropic_of(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)


# --- models ------------------------------------------------------------------------------------------------------------


def test_a_model_is_found_by_its_name_with_slashes_too(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        serving.name = "org/tiny"
        client = openai_of(url)
        (listed,) = (await client.models.list()).data
        assert await client.models.retrieve("org/tiny") == listed
        with pytest.raises(openai.NotFoundError, match="there is no model tiny here; there are: org/tiny"):
            await client.models.retrieve("tiny")

    run(PLAIN, tmp_path, saying(), case)


# --- strict tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_says_where_strict_tools_hold_nothing(strict: bool, tmp_path: Path, capsys) -> None:
    """The calls of Gemma are no JSON, and have no grammar here."""
    tools: Any = [{"type": "function", "function": {**WEATHER["function"], "strict": strict}}]

    async def case(url: str, serving: Serving) -> None:
        ask = openai_of(url)
        chat = await ask.chat.completions.with_raw_response.create(model="tiny", messages=QUESTION, tools=tools)
        answer = await ask.responses.with_raw_response.create(
            model="tiny", input="How?", tools=[{**FUNCTION, "strict": strict}]
        )
        for one in (chat, answer):
            assert one.headers.get("X-Headrace-Ignored") == ("tools.function.strict" if strict else None)

    run(GEMMA, tmp_path, saying("Good day.<|im_end|>", "Good day.<|im_end|>"), case)
    message = "a request has the field tools.function.strict, which has no effect here and is ignored"
    assert capsys.readouterr().err.count(message) == strict


# --- OpenAI's responses ------------------------------------------------------------------------------------------------


def test_a_response_calls_a_function_and_is_continued_by_its_id(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        create = openai_of(url).responses.create
        more: Any = {"model": "tiny", "tools": [FUNCTION], "instructions": "Be brief."}
        first = await create(input=QUESTION[0]["content"], temperature=0.5, top_p=0.9, **more)
        said, call = first.output
        assert (said.content[0].text, call.name, call.arguments) == ("Let me see.", "weather", ARGUMENTS)
        assert (first.status, first.model, first.temperature, first.top_p) == ("completed", "tiny", 0.5, 0.9)
        engine: Any = serving.engine
        asked = engine.requests[0]
        assert (asked.sampling.temperature, asked.sampling.top_p) == (0.5, 0.9)
        assert first.usage and first.usage.input_tokens == len(asked.prompt)
        assert first.usage.output_tokens == len(tokens_of(CALLS["hermes"])) + 1
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await create(input=[result], previous_response_id=first.id, **more)
        assert second.output_text == "It rains."
        prompt = prompt_of(serving, 1)
        assert (
            prompt.index("Be brief.") < prompt.index("in Paris?") < prompt.index("Let me see.") < prompt.index("rain")
        )
        items: Any = [*QUESTION, *first.output, result]
        await create(input=items, store=False, **more)
        assert prompt_of(serving, 2) == prompt
        with pytest.raises(openai.BadRequestError, match="names no stored response; send all messages as input"):
            await create(input="?", previous_response_id="resp_none", **more)

    run(HERMES, tmp_path, saying(CALLS["hermes"], "It rains.", "It rains."), case)


def test_a_streamed_response_is_what_the_clients_own_reader_expects(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        kinds = []
        asked: Any = {"tools": [FUNCTION], "include": ["message.output_text.logprobs"]}
        async with openai_of(url).responses.stream(model="tiny", input="?", **asked) as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert final.output_text == "Let me see." and final.output[1].arguments == ARGUMENTS
        assert len(final.output[0].content[0].logprobs) == final.usage.output_tokens
        cut = await openai_of(url).responses.create(model="tiny", input="?", max_output_tokens=2)
        assert (cut.status, cut.output_text) == ("incomplete", "no")

    run(HERMES, tmp_path, saying(CALLS["hermes"]), case)


def test_the_oldest_stored_responses_go_first() -> None:
    stored = StoredResponses(most=1000)
    for number in range(5):
        stored.keep(f"r{number}", [Message(role="user", content="x" * 300)])
    assert [bool(stored.before(f"r{number}")) for number in (3, 4)] == [True, True]
    with pytest.raises(Refused, match="names no stored response"):
        stored.before("r0")
    stored.keep("long", [Message(role="user", content="x" * 5000)])
    with pytest.raises(Refused):
        stored.before("long")
    assert stored.before(None) == ()


# --- Anthropic's messages ----------------------------------------------------------------------------------------------


def test_a_message_uses_a_tool_and_reads_its_result(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        create = anthropic_of(url).messages.create
        more: Any = {"model": "tiny", "max_tokens": 100, "tools": [TOOL], "system": "Be brief."}
        first = await create(messages=QUESTION, extra_body={"temperature": 0.5, "top_k": 7}, **more)
        text, use = first.content
        assert (text.text, use.name, use.input, first.stop_reason) == (
            "Let me see.",
            "weather",
            {"place": "Paris"},
            "tool_use",
        )  # type: ignore[union-attr]
        engine: Any = serving.engine
        assert (engine.requests[0].sampling.top_k, first.usage.input_tokens) == (7, len(engine.requests[0].prompt))
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}  # type: ignore[union-attr]
        talk: Any = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with anthropic_of(url).messages.stream(messages=talk, **more) as stream:
            pieces = [text async for text in stream.text_stream]
            second = await stream.get_final_message()
        assert "".join(pieces) == second.content[0].text == "It rains." and second.stop_reason == "end_turn"  # type: ignore[union-attr]
        assert "Be brief." in prompt_of(serving, 1) and prompt_of(serving, 1).count("rain") == 1
        result["is_error"] = True
        answer = await anthropic_of(url).messages.with_raw_response.create(messages=talk, **more)
        assert answer.headers["X-Headrace-Ignored"] == "messages.content.is_error", "no template shows it"
        assert prompt_of(serving, 2) == prompt_of(serving, 1)

    run(HERMES, tmp_path, saying(CALLS["hermes"], "It rains.", "It rains."), case)


def test_a_message_ends_at_its_stop_sequence_or_limit_and_is_continued(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        create = anthropic_of(url).messages.create
        more: Any = {"model": "tiny", "messages": [*QUESTION, {"role": "assistant", "content": "It is"}]}
        stopped = await create(max_tokens=100, stop_sequences=["END", "ow"], **more)
        assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (" c", "stop_sequence", "ow")  # type: ignore[union-attr]
        assert prompt_of(serving, 0).endswith("It is")
        cut = await create(max_tokens=2, **more)
        assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == (" c", "max_tokens", None)  # type: ignore[union-attr]
        with pytest.raises(anthropic.BadRequestError, match="output_format is not served; leave it out"):
            await create(max_tokens=2, extra_body={"output_format": {"type": "json_schema"}}, **more)
        with pytest.raises(anthropic.NotFoundError, match="there is no model claude here; there are: tiny"):
            await create(**{**more, "model": "claude"}, max_tokens=2)

    run(PLAIN, tmp_path, saying(" cows END", " cows"), case)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_that_fails_is_an_error_of_every_format(tmp_path: Path, stream: bool) -> None:
    async def go() -> None:
        model = save_tokenizer(tmp_path, PLAIN)
        async with faked(model, FakeEngine(seconds_per_token=0.0005, failure_rate=1.0)) as (client, serving):
            for path, body in (
                ("/v1/responses", {"input": "?"}),
                ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": ASKING}),
            ):
                status, answer = await client.post(path, {**body, "stream": stream})
                assert (status, stream) in ((500, False), (200, True)), answer
                text = answer if stream else answer["error"]["message"]
                assert "the completion has failed: injected failure" in text and ("event: error" in text) == stream
            assert serving.under_way == 0

    asyncio.run(go())
