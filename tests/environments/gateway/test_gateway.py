"""The gateway, driven by the official `openai` and `anthropic` clients: one rollout's turns over HTTP, and what becomes of them (C5)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anthropic
import openai
import pytest

from headrace.core.batches import Failure
from headrace.core.protocols import Limits
from headrace.core.types import Completion
from headrace.episodes.environments.gateway.history_trees import LIMIT_REPLIES
from headrace.episodes.rollout_session import Played, TurnAsked
from headrace.web.limits import ServerLimits
from support import tool_chats
from support.gateway.gateway_agent import LONGEST, Asks, parents, played, user
from support.gateway.written_turns import Model, check_rows, encoder_of

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
    },
}
CALL = 'I add. <tool_call>{"name": "add",  "arguments": {"a":1}}</tool_call><|im_end|>'


def test_a_chat_with_a_tool_extends_the_sampled_tokens(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL, "is 12<|im_end|>", "No.<|im_end|>"])

    async def case(asks: Asks) -> None:
        reply = await asks.chat(user("1 and 11?"), tools=[ADD])
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a":1}')
        assert reply.usage.prompt_tokens == len(model.asked[0].context)
        assert reply.usage.completion_tokens == len(model.sampled[0].tokens) and reply.model == "gpt-5"
        talk = [user("1 and 11?"), choice.message, {"role": "tool", "tool_call_id": call.id, "content": "12"}]
        second = await asks.chat(*talk, tools=[ADD])
        assert second.choices[0].message.content == "is 12" and second.choices[0].finish_reason == "stop"
        assert second.usage.prompt_tokens == len(model.asked[1].context)
        third = await asks.said(*talk, second.choices[0].message, user("sure?"), tools=[ADD])
        assert third.content == "No."

    found = played(model, case)
    assert parents(found) == [(), (0,), (1,)]
    assert model.asked[1].context[: len(model.asked[0].context) + len(model.sampled[0].tokens)] == (
        *model.asked[0].context,
        *model.sampled[0].tokens,
    )
    check_rows(found, model)


def test_no_two_calls_of_a_history_have_one_id_though_it_was_edited(tmp_path: Path) -> None:
    """Clients pair calls and results by their ids. A history that was edited begins a path of its own, and still holds calls of the one before."""
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL] * 3)

    async def case(asks: Asks) -> None:
        talk, ids = [user("1 and 11?")], []
        for number in range(3):
            talk[0] = user(f"edited {number}")
            said = await asks.said(*talk, tools=[ADD])
            ids.append(said.tool_calls[0].id)
            talk += [said, {"role": "tool", "tool_call_id": ids[-1], "content": "12"}]
        assert ids == ["call00001", "call00002", "call00003"]

    found = played(model, case)
    assert parents(found) == [(), (), ()]
    check_rows(found, model)


def test_parallel_requests_and_two_that_continue_one_reply_are_a_tree(tmp_path: Path) -> None:
    """And a request whose history was edited begins a path of its own."""
    says = [f"reply {number}<|im_end|>" for number in range(6)]
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), says)

    async def case(asks: Asks) -> None:
        first = await asks.said(user("a"))
        both = await asyncio.gather(*(asks.said(user("a"), first, user(word)) for word in ("b", "c")))
        assert sorted(one.content for one in both) == ["reply 1", "reply 2"]
        edited = {"role": "assistant", "content": "I never said that"}
        await asks.said(user("a"), edited, user("b"))
        await asks.said(user("a"), first, user("b"), both[0], user("d"))
        await asks.said(user("a"))

    found = played(model, case)
    assert parents(found) == [(), (0,), (0,), (), (1,), ()] or parents(found) == [(), (0,), (0,), (), (2,), ()]
    check_rows(found, model)
    assert "I never said that" in model.encoder.written(model.asked[3].context)


async def losing(url: str, lost: set[int]) -> str:
    """The address of a proxy that loses the answers with these numbers, from 0, after it has read them."""
    host, _, port = urlsplit(url).netloc.partition(":")
    numbers = itertools.count()

    async def message(reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head + await reader.readexactly(int(size))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                asked = await message(reader)
                there, away = await asyncio.open_connection(host, int(port))
                with contextlib.closing(away):
                    away.write(asked)
                    answer = await message(there)
                if next(numbers) in lost:
                    return
                writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return url.replace(f"{host}:{port}", "127.0.0.1:{1}".format(*server.sockets[0].getsockname()))


def test_an_answer_that_was_lost_on_its_way_is_the_answer_to_the_next_attempt(tmp_path: Path) -> None:
    """Clients send a request again by themselves. The turn that nobody had read was trained beside the one that was read, with its reward."""
    says = [f"reply {number}<|im_end|>" for number in range(6)]
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), says)

    async def case(asks: Asks) -> None:
        url, key = await losing(asks.url, {0, 1, 3, 5}), asks.rollout.secret
        chats = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2).chat.completions
        first = (await chats.create(model="m", messages=[user("a")])).choices[0].message
        assert first.content == "reply 0"
        talk: Any = [user("a"), first, user("b")]
        assert (await chats.create(model="m", messages=talk)).choices[0].message.content == "reply 1"
        messages = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=2).messages
        said = await messages.create(model="m", max_tokens=20, messages=[user("c")])
        assert said.content[0].text == "reply 2"  # type: ignore[union-attr]
        assert (await chats.create(model="m", messages=talk)).choices[0].message.content == "reply 3", "asked anew"

    found = played(model, case)
    assert parents(found) == [(), (0,), (), (0,)]
    check_rows(found, model)


def test_which_of_several_equal_requests_has_lost_its_answer_is_not_guessed(tmp_path: Path) -> None:
    """An agent that asks for the best of two gets two turns, though one of its requests was refused before, or came again."""
    says = [f"reply {number}<|im_end|>" for number in range(6)]
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), says)

    async def case(asks: Asks) -> None:
        def ask(attempt: int) -> Any:
            return asks.said(user("a"), extra_headers={"x-stainless-retry-count": str(attempt)})

        both = await asyncio.gather(ask(0), ask(0))
        again = await ask(1)
        one = await ask(0)
        last = await ask(0), await ask(1)
        texts = [reply.content for reply in (*both, again, one, *last)]
        assert len(set(texts[:5])) == 5 and texts[5] == texts[4], texts

    assert parents(played(model, case)) == [()] * 5


def test_messages_of_another_author_are_another_history(tmp_path: Path) -> None:
    """The name of a reply, which frameworks add, is none of the history."""
    named = tool_chats.PLAIN.replace("message.role +", "message.role + (message.name or '') +")
    model = Model(encoder_of(tmp_path, named), ["so<|im_end|>"] * 9)

    async def case(asks: Asks) -> None:
        reply = await asks.said({**user("?"), "name": "ann"})
        mine = {"role": "assistant", "content": reply.content, "name": "solver"}
        await asks.said({**user("?"), "name": "ann"}, mine, user("and?"))
        await asks.said({**user("?"), "name": "bob"}, mine, user("and?"))

    found = played(model, case)
    assert parents(found) == [(), (0,), ()]
    assert "userbob" in model.encoder.written(model.asked[2].context)


def test_strict_tools_are_shown_and_remarked_on(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), ["No.<|im_end|>"])
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    messages: list[str] = []

    async def case(asks: Asks) -> None:
        await asks.chat(user("1 and 11?"), tools=[strict])
        messages.extend(asks.gateway.remarks())

    played(model, case)
    assert messages == [
        "the agent declares strict tools; their arguments are what the model writes, and need not fit the schema"
    ]
    assert '"add"' in model.encoder.written(model.asked[0].context)


def test_a_reply_is_without_the_stop_string_and_extends_the_tokens_that_have_it(tmp_path: Path) -> None:
    """The stop string is in the sampled tokens, and an agent that asks for one gets the text before it (OpenAI's `stop`)."""
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["Look it up.\nSeen:", "42<|im_end|>"])

    async def case(asks: Asks) -> None:
        first = await asks.said(user("?"), stop=["Seen:"])
        assert first.content == "Look it up.\n"
        assert (await asks.said(user("?"), first, user("Seen: 42"))).content == "42"

    found = played(model, case, stop=["Seen:"])
    assert parents(found) == [(), (0,)]
    check_rows(found, model)


def test_a_stream_has_the_whole_reply(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL])

    async def case(asks: Asks) -> None:
        options: Any = {"include_usage": True}
        text, calls, reasons = "", [], []
        async for chunk in await asks.chat(user("?"), tools=[ADD], stream=True, stream_options=options):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert (text, reasons) == ("I add.", ["tool_calls"]) and calls[0].function.arguments == '{"a":1}'
        assert chunk.usage.completion_tokens == len(model.sampled[0].tokens)

    assert parents(played(model, case)) == [()]


def test_log_probs_are_the_samplers_and_models_are_listed(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"])

    async def case(asks: Asks) -> None:
        content = (await asks.chat(user("?"), logprobs=True)).choices[0].logprobs.content
        done = model.sampled[0]
        assert [one.logprob for one in content] == list(done.logprobs) and content[-1].token == "<|im_end|>"
        (listed,) = (await asks.client.models.list()).data
        assert listed.id == "policy" == (await asks.client.models.retrieve("policy")).id
        assert (await asks.client.models.retrieve("policy/critic")).id == "policy/critic"

    played(model, case)


def test_a_request_may_ask_for_fewer_tokens(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so", "so<|im_end|>"])

    async def case(asks: Asks) -> None:
        assert (await asks.chat(user("?"), max_tokens=2)).choices[0].finish_reason == "length"
        await asks.chat(user("?"), max_completion_tokens=5)

    played(model, case)
    assert [asked.most for asked in model.asked] == [2, 5]


def test_what_the_run_decides_is_replaced_and_said_and_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"] * 9)
    messages: list[str] = []

    async def case(asks: Asks) -> None:
        await asks.chat(user("?"), temperature=0.2, top_p=1, stop=["END"], extra_body={"skip_special_tokens": True})
        messages.extend(asks.gateway.remarks())
        for more, words in (
            ({"n": 2}, "send as many requests"),
            ({"stop": ["Observation:"]}, "set rollout.stop = ['Observation:']"),
            ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
            ({"response_format": {"type": "xml"}}, "response_format.type = 'xml' is none"),
            ({"logit_bias": {"3": 1}}, "drawn from another distribution than the one that is trained"),
            ({"tools": [ADD]}, "does not show tools"),
            ({"max_tokens": 0}, "asks for nothing"),
            ({"seed": 7}, "all rollouts of a prompt would be equal"),
            ({"extra_body": {"ignore_eos": True}}, "ignore_eos is not served"),
            ({"extra_body": {"stop_token_ids": [3]}}, "stop_token_ids is not served"),
        ):
            with pytest.raises(openai.BadRequestError, match=words.replace("[", r"\[")):
                await asks.chat(user("?"), **more)
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not served"):
            await asks.client.embeddings.create(model="a", input="b")

    found = played(model, case, stop=["END"])
    assert len(parents(found)) == 1
    assert messages == [
        "the agent asks for skip_special_tokens = True; replies show special tokens as reward.special_tokens says",
        "the agent asks for temperature = 0.2; all its turns are sampled with rollout.temperature = 1.0",
    ]


def test_a_stranger_gets_401_and_no_turn(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"] * 9)

    async def case(asks: Asks) -> None:
        body = {"messages": [user("?")]}
        other = await asks.gateway.open(lambda role: pytest.fail("the other rollout was asked"))
        address = asks.url.removesuffix(asks.rollout.secret)
        async with aiohttp.ClientSession() as session:

            async def status(path: str, key: str, **more: Any) -> int:
                headers = {"Authorization": f"Bearer {key}"} | ({"Content-Type": "application/json"} if more else {})
                async with session.post(address + path, headers=headers, **(more or {"json": body})) as answer:
                    return answer.status

            path = f"{asks.rollout.secret}/v1/chat/completions"
            assert await status("v1/chat/completions", asks.rollout.secret) == 401
            assert await status(f"x{path}", asks.rollout.secret) == 401
            assert await status(f"{asks.rollout.secret[:-1]}/v1/nothing", "none") == 401
            assert await status(path, other.secret) == 401, "a key of another rollout"
            assert await status(f"{other.secret}/v1/chat/completions", asks.rollout.secret) == 401
            assert await status(path, "sk-of-my-own") == 200
            assert await status(path, "k", data=b"x" * 3000) == 413
            assert await status(path, "k", data=b"{") == 400
            await asks.gateway.shut(other)
            assert await status(f"{other.secret}/v1/chat/completions", other.secret) == 401, "it is over"

    found = played(model, case, server=ServerLimits(body_bytes=2000))
    assert parents(found) == [()]


def test_at_a_limit_the_reply_is_empty_and_who_asks_on_has_failed(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"] * 9)

    async def stops(asks: Asks) -> None:
        await asks.said(user("?"))
        reply = (await asks.chat(user("!"))).choices[0]
        assert (reply.message.content, reply.finish_reason) == ("", "length")

    found = played(model, stops, limits=Limits(turns=1))
    assert isinstance(found, Played) and found.episode.cut == "turns" and len(found.episode.turns) == 1

    async def goes_on(asks: Asks) -> None:
        for _ in range(1 + LIMIT_REPLIES):
            await asks.said(user("?"))
        with pytest.raises(openai.BadRequestError, match="the rollout is over"):
            await asks.said(user("?"))
        assert asks.rollout.over.is_set()

    found = played(model, goes_on, limits=Limits(turns=1))
    assert isinstance(found, Failure) and found.reason == "environment_turns"


class Slow(Model):
    """An engine that takes its time, until it is cancelled."""

    begun = cancelled = 0

    async def __call__(self, asked: TurnAsked) -> Completion:
        if asked.turn:
            return await super().__call__(asked)
        self.begun += 1
        try:
            await asyncio.sleep(LONGEST)
        finally:
            self.cancelled += 1
        raise AssertionError


def test_a_client_that_leaves_takes_its_turn_with_it(tmp_path: Path) -> None:
    model = Slow(encoder_of(tmp_path, tool_chats.PLAIN), ["", "so<|im_end|>", "yes<|im_end|>"])

    async def case(asks: Asks) -> None:
        asking = asyncio.ensure_future(asks.chat(user("?")))
        while not model.begun:
            await asyncio.sleep(0.01)
        asking.cancel()
        while asks.rollout.asking:
            await asyncio.sleep(0.01)
        reply = await asks.said(user("?"))
        assert reply.content == "so" and (await asks.said(user("?"), reply, user("!"))).content == "yes"

    found = played(model, case)
    assert model.cancelled == 1 and parents(found) == [(), (0,)], "the turns that were sampled"
    check_rows(found, model)


def test_a_rollout_that_ends_ends_its_requests(tmp_path: Path) -> None:
    model = Slow(encoder_of(tmp_path, tool_chats.PLAIN), ["", "so<|im_end|>"])
    left: list[asyncio.Task[Any]] = []

    async def case(asks: Asks) -> None:
        left.append(asyncio.create_task(asks.chat(user("?"))))
        while not asks.rollout.asking:
            await asyncio.sleep(0.01)
        await asks.chat(user("?"))
        await asks.gateway.shut(asks.rollout)
        with pytest.raises(openai.BadRequestError, match="its agent has ended"):
            await left[0]

    assert isinstance(played(model, case), Played) and model.cancelled == 1


def test_the_blocking_client_and_an_engine_that_is_lost(tmp_path: Path) -> None:
    class Dies(Model):
        async def __call__(self, asked: TurnAsked) -> Completion:
            raise OSError("the engine is gone")

    def talk(asks: Asks) -> None:
        client = openai.OpenAI(base_url=f"{asks.url}/v1", api_key="own", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="the engine has failed"):
            client.chat.completions.create(model="a", messages=[user("?")])

    async def case(asks: Asks) -> None:
        await asyncio.to_thread(talk, asks)

    with pytest.raises(OSError, match="the engine is gone"):
        played(Dies(encoder_of(tmp_path, tool_chats.PLAIN), []), case)


# -- Anthropic's client -------------------------------------------------------------------------------------------------------

CALLS_ADD = {"type": "tool_use", "id": "call00001", "name": "add", "input": {"a": 1}}
ANTHROPIC_ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
}


def anthropic_client(asks: Asks) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=asks.url, api_key=asks.rollout.secret, max_retries=0)


def test_anthropics_client_and_openais_continue_one_chat(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL, "is 12<|im_end|>", "No.<|im_end|>"])

    async def case(asks: Asks) -> None:
        async with anthropic_client(asks) as client:
            talk: Any = [user("1 and 11?")]
            rest: Any = {"model": "claude", "max_tokens": 50, "system": "You add.", "tools": [ANTHROPIC_ADD]}
            first = await client.messages.create(messages=talk, **rest)
            said, call = first.content
            assert (said.text, first.stop_reason) == ("I add.", "tool_use")
            assert (call.name, call.input) == ("add", {"a": 1}) and first.model == "claude"
            assert first.usage.output_tokens == len(model.sampled[0].tokens)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "12", "is_error": True}
            talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await client.messages.create(messages=talk, **rest)
            assert (second.content[0].text, second.stop_reason) == ("is 12", "end_turn")
        assert any("messages.content.is_error" in remark for remark in asks.gateway.remarks())
        made: Any = {"name": "add", "arguments": '{"a": 1}'}
        history = [
            {"role": "system", "content": "You add."},
            user("1 and 11?"),
            {
                "role": "assistant",
                "content": "I add.",
                "tool_calls": [{"id": call.id, "type": "function", "function": made}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "12"},
            {"role": "assistant", "content": "is 12"},
            user("sure?"),
        ]
        assert (await asks.said(*history)).content == "No."

    found = played(model, case)
    assert parents(found)[:2] == [(), (0,)]
    check_rows(found, model)
    text = model.encoder.written(model.asked[0].context)
    assert "You add." in text and "1 and 11?" in text and model.asked[0].most == 50


def test_anthropics_stream_has_the_whole_reply(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL])

    async def case(asks: Asks) -> None:
        rest: Any = {"model": "claude", "max_tokens": 50, "tools": [ANTHROPIC_ADD], "messages": [user("1?")]}
        async with anthropic_client(asks) as client, client.messages.stream(**rest) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "I add." and final.stop_reason == "tool_use" and final.content[1].input == {"a": 1}
        assert final.usage.output_tokens == len(model.sampled[0].tokens)

    assert parents(played(model, case)) == [()]


def test_what_anthropics_client_cannot_have_is_refused(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    refused: list[tuple[Any, str]] = [
        (
            {"tool_choice": {"type": "tool", "name": "sub"}, "tools": [ANTHROPIC_ADD]},
            "tool_choice names sub, which is none",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not served"),
        ({"stop_sequences": ["END"]}, "is not a stop string of the run"),
        (
            {"messages": [{"role": "user", "content": [image]}]},
            "of type image; only text and tools are served; a run shows images of its rows",
        ),
        (
            {"messages": [user("?"), {"role": "assistant", "content": [CALLS_ADD]}]},
            "the last message calls a tool; end",
        ),
    ]

    async def case(asks: Asks) -> None:
        async with anthropic_client(asks) as client:
            for more, words in refused:
                with pytest.raises(anthropic.BadRequestError, match=words):
                    await client.messages.create(
                        **{"model": "claude", "max_tokens": 50, "messages": [user("?")], **more}
                    )
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(base_url=f"{asks.url}x").messages.create(
                    model="claude", max_tokens=5, messages=[user("?")]
                )

    played(model, case)
    assert not model.asked


def test_plain_arguments_of_a_call_get_the_types_of_the_schema(tmp_path: Path) -> None:
    call = "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    model = Model(encoder_of(tmp_path, tool_chats.QWEN_CODER), [f"{call}<|im_end|>"] * 2 + ["12<|im_end|>"])
    kinds = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": kinds}}

    async def case(asks: Asks) -> None:
        made = (await asks.said(user("?"), tools=[tool])).tool_calls[0]
        assert json.loads(made.function.arguments) == {"a": 12}
        stream = await asks.chat(user("??"), tools=[tool], stream=True)
        deltas = [chunk.choices[0].delta.tool_calls async for chunk in stream]
        (streamed,) = [one for delta in deltas for one in delta or ()]
        assert streamed.function.arguments == made.function.arguments
        answer = {"role": "tool", "tool_call_id": made.id, "content": "12"}
        said = {"role": "assistant", "content": "", "tool_calls": [made.model_dump()]}
        assert (await asks.said(user("?"), said, answer, tools=[tool])).content == "12"

    found = played(model, case)
    assert parents(found) == [(), (), (0,)]
    check_rows(found, model)
