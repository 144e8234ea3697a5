"""The official `openai` client against `headrace serve`: chats, completions, streams, tools, errors, from one thread and from asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.core.types import Request
from headrace.serve.serving import Serving
from headrace.testing.fake_engine import FakeEngine
from support.served import faked
from support.tool_chats import PLAIN, TEMPLATES, save_tokenizer, tokens_of

LONGEST = 300
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
ASKING: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
ARGUMENTS = '{"place": "Paris"}'
CALLS = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "mistral-list": f'Let me see.[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
    "mistral-named": f"Let me see.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "llama3": f'Let me see.<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "gemma": 'Let me see.<|tool_call>call:weather{place:<|"|>Paris<|"|>}<tool_call|>',
    "function-gemma": "Let me see.<start_function_call>call:weather{place:<escape>Paris<escape>}<end_function_call>",
    "qwen3-coder": "Let me see.\n<tool_call>\n<function=weather>\n<parameter=place>\nParis\n</parameter>\n</function>\n</tool_call>",
}
BROKEN = 'I call <tool_call>{"name": "weather", "arguments": {"place": "Par}</tool_call>'


def saying(*texts: str) -> FakeEngine:
    """An engine that gives these answers in turn; one that was shown the answer of a tool repeats its last words."""
    left = list(texts)

    def script(request: Request) -> Sequence[int]:
        return tokens_of((left.pop(0) if left else "nothing") + "</s>")

    return FakeEngine(seconds_per_token=0.0005, script=script, context_length=5000)


def run(template: str, where: Path, engine: FakeEngine, case: Callable[[str, Serving], Awaitable[None]]) -> None:
    async def go() -> None:
        model = save_tokenizer(where, template)
        async with asyncio.timeout(LONGEST), faked(model, engine) as (client, serving):
            await case(f"{client.url}/v1", serving)
            assert serving.under_way == 0, "everything was released"

    asyncio.run(go())


def prompt_of(serving: Serving, place: int) -> str:
    engine: Any = serving.engine
    return serving.encoder.written(engine.requests[place].prompt)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_tool_is_called_answered_and_its_answer_read(family: str, tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        first = await client.chat.completions.create(model="tiny", messages=ASKING, tools=[WEATHER])
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather" and call.function.arguments == ARGUMENTS
        assert "The weather of a place" in prompt_of(serving, 0)

        talk = [*ASKING, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain, 12 degrees"}]
        second = await client.chat.completions.create(model="tiny", messages=talk, tools=[WEATHER])
        assert second.choices[0].finish_reason == "stop" and second.choices[0].message.content == "It rains."
        assert second.choices[0].message.tool_calls is None
        assert (
            "rain, 12 degrees" in prompt_of(serving, 1)
            and "Paris" in prompt_of(serving, 1).partition("weather in Paris?")[2]
        )

    run(TEMPLATES[family], tmp_path, saying(CALLS[family], "It rains."), case)


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_streamed_call_is_the_whole_one(family: str, tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        text, calls, reasons = "", {}, []
        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="tiny", messages=ASKING, tools=[WEATHER], stream=True, stream_options=options
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
                for delta in choice.delta.tool_calls or []:
                    name, arguments = calls.get(delta.index, ("", ""))
                    assert delta.function and (name or delta.id)
                    calls[delta.index] = (
                        name + (delta.function.name or ""),
                        arguments + (delta.function.arguments or ""),
                    )
        assert (text, reasons, calls) == ("Let me see.", ["tool_calls"], {0: ("weather", ARGUMENTS)})
        assert chunk.usage and chunk.usage.completion_tokens == len(tokens_of(CALLS[family])) + 1

    run(TEMPLATES[family], tmp_path, saying(CALLS[family]), case)


def test_plain_arguments_get_the_types_of_the_schema(tmp_path: Path) -> None:
    """Qwen3-Coder's values are neither quoted nor escaped."""
    kinds = {"place": {"type": "string"}, "days": {"type": "integer"}}
    tool: Any = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": kinds}},
    }
    written = "<parameter=place>\n75001\n</parameter>\n<parameter=days>\n3\n</parameter>"
    call = f"<tool_call>\n<function=weather>\n{written}\n</function>\n</tool_call>"

    async def case(url: str, serving: Serving) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        chat = await client.chat.completions.create(model="tiny", messages=ASKING, tools=[tool])
        (made,) = chat.choices[0].message.tool_calls or []
        assert made.type == "function" and json.loads(made.function.arguments) == {"place": "75001", "days": 3}
        function: Any = {"type": "function", "strict": None, **tool["function"]}
        response = await client.responses.create(model="tiny", input="?", tools=[function])
        (item,) = response.output
        assert item.type == "function_call" and json.loads(item.arguments) == {"place": "75001", "days": 3}
        result = {"role": "tool", "tool_call_id": made.id, "content": "rain"}
        talk: Any = [*ASKING, chat.choices[0].message, result]
        await client.chat.completions.create(model="tiny", messages=talk, tools=[tool])
        assert written in prompt_of(serving, 2)

    run(TEMPLATES["qwen3-coder"], tmp_path, saying(call, call), case)


def test_what_is_no_call_stays_text(tmp_path: Path) -> None:
    """A malformed one, one that nobody offered, one that was not to be made, and one that was cut off."""
    two = CALLS["hermes"] + "\n" + CALLS["hermes"].replace("Let me see.\n", "")

    async def case(url: str, serving: Serving) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

        async def ask(**more: Any) -> Any:
            return (await client.chat.completions.create(model="tiny", messages=ASKING, **more)).choices[0]

        broken = await ask(tools=[WEATHER])
        assert (broken.finish_reason, broken.message.content, broken.message.tool_calls) == ("stop", BROKEN, None)
        for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
            plain = await ask(**more)
            assert (plain.finish_reason, plain.message.content) == ("stop", CALLS["hermes"])
            assert "The weather" not in prompt_of(serving, -1)
        several = await ask(tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True)
        assert len(several.message.tool_calls) == 2 and several.finish_reason == "tool_calls"
        assert len({call.id for call in several.message.tool_calls}) == 2
        cut = await ask(tools=[WEATHER], max_tokens=30)
        assert (cut.finish_reason, cut.message.content) == ("length", CALLS["hermes"][:30])
        late = await ask(tools=[WEATHER], max_tokens=len(tokens_of(CALLS["hermes"])) + 2)
        assert late.finish_reason == "length" and len(late.message.tool_calls) == 1, "the call was whole before"
        stopped = await ask(tools=[WEATHER], stop=["</tool_call>"])
        assert stopped.finish_reason == "tool_calls" and stopped.message.tool_calls[0].function.arguments == ARGUMENTS

    one = CALLS["hermes"]
    run(TEMPLATES["hermes"], tmp_path, saying(BROKEN, one, one, one, two, one, two, one), case)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice = 'always' is none; choose auto, none, required"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "tide"}}}, "tool_choice names tide, which is none"),
    ({"tool_choice": "required"}, "tool_choice asks for a call, and there are no tools"),
    ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
    ({"response_format": {"type": "xml"}}, "response_format.type = 'xml' is none"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, "response_format: the JSON schema cannot be followed"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"functions": [{"name": "weather"}]}, "functions is not served; give them as tools"),
    ({"messages": [*ASKING, {"role": "tool", "tool_call_id": "x", "content": "rain"}]}, "messages[1] answers the tool call x"),
    ({"messages": [{"role": "tool", "content": {"a": 1}}]}, "messages[0].content"),
]  # fmt: skip


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        for more, words in REFUSED:
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.chat.completions.create(**{"model": "tiny", "messages": ASKING, **more})
            assert words in str(refusal.value), (more, str(refusal.value))
        assert serving.counters.completions == 0

    run(TEMPLATES["hermes"], tmp_path, saying(), case)


def test_a_model_whose_template_has_no_tools_is_offered_none(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        call: Any = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        history: Any = [*ASKING, {"role": "assistant", "tool_calls": [call]}]
        for messages, tools in ((ASKING, [WEATHER]), (history, openai.NOT_GIVEN)):
            with pytest.raises(openai.BadRequestError, match="does not show tools to the model"):
                await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
        answer = await client.chat.completions.create(
            model="tiny", messages=ASKING, tools=[WEATHER], tool_choice="none"
        )
        assert answer.choices[0].message.content == "Fine."

    run(PLAIN, tmp_path, saying("Fine."), case)


def test_the_client_in_a_thread_talks_streams_completes_and_is_refused(tmp_path: Path) -> None:
    def talk(url: str) -> None:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(
            model="tiny", messages=ASKING, logprobs=True, top_logprobs=2, seed=7, max_completion_tokens=50
        )
        assert chat.choices[0].message.content == "Good day." and chat.usage
        content = (chat.choices[0].logprobs and chat.choices[0].logprobs.content) or []
        assert len(content) == chat.usage.completion_tokens and content[0].token == "G"
        assert content[0].top_logprobs[0].token == "G" and len(content[0].top_logprobs) == 2
        pieces = list(client.chat.completions.create(model="tiny", messages=ASKING, stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Good night."
        assert pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices[0].finish_reason == "stop"
        with client.chat.completions.stream(model="tiny", messages=ASKING) as events:
            final = events.get_final_completion().choices[0]
        assert (final.message.content, final.finish_reason) == ("Good grief.", "stop")
        plain = client.completions.create(model="tiny", prompt="Once", max_tokens=4)
        assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("upon", "length")
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=ASKING)
        assert raw.status_code == 200 and json.loads(raw.content)["choices"][0]["token_ids"] == tokens_of("Bye.</s>")
        with pytest.raises(openai.NotFoundError, match="there is no model gpt"):
            client.chat.completions.create(model="gpt", messages=ASKING)
        with pytest.raises(openai.BadRequestError, match="leaves room for"):
            client.chat.completions.create(model="tiny", messages=ASKING, max_tokens=10_000)

    async def case(url: str, serving: Serving) -> None:
        await asyncio.to_thread(talk, url)

    run(TEMPLATES["hermes"], tmp_path, saying("Good day.", "Good night.", "Good grief.", "upon a time", "Bye."), case)


def test_many_at_once_and_one_that_leaves_in_the_middle_of_its_stream(tmp_path: Path) -> None:
    async def case(url: str, serving: Serving) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        stream = await client.chat.completions.create(model="tiny", messages=ASKING, stream=True)
        await anext(stream)
        await stream.close()
        while serving.under_way:
            await asyncio.sleep(0.005)
        assert serving.counters.cancelled == 1
        asking = [client.chat.completions.create(model="tiny", messages=ASKING, n=2) for _ in range(10)]
        answers = await asyncio.gather(*asking)
        assert [choice.index for answer in answers for choice in answer.choices] == [0, 1] * 10
        assert {choice.message.content for answer in answers for choice in answer.choices} == {"nothing"}

    run(TEMPLATES["hermes"], tmp_path, saying("a long story " * 200), case)
