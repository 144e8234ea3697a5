"""Streams of the gateway: text arrives while it is sampled, in each of the formats, and a stream that breaks says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from headrace.core.protocols import Limits
from headrace.episodes.rollout_session import Played
from support import tool_chats
from support.gateway.gateway_agent import LONGEST, Asks, parents, played, user
from support.gateway.written_turns import Model, check_rows, encoder_of

SAID = "The first half, and the second.<|im_end|>"
HELD = 15
"""Tokens that the engine samples before it waits for the client to have read some of them."""


@dataclass
class Held(Model):
    """An engine that stops in the middle of a turn until the client has read its beginning; or for ever, or with an error."""

    read: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: bool = False
    cancelled: bool = False

    async def before(self, place: int) -> None:
        if place != HELD:
            return
        try:
            async with asyncio.timeout(LONGEST / 2):
                await self.read.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.breaks:
            raise OSError("the engine is gone")


async def chat(asks: Asks) -> AsyncIterator[str]:
    async for chunk in await asks.chat(user("?"), stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


async def completions(asks: Asks) -> AsyncIterator[str]:
    async for chunk in await asks.client.completions.create(model="a", prompt="So", max_tokens=99, stream=True):
        if chunk.choices[0].text:
            yield chunk.choices[0].text


async def responses(asks: Asks) -> AsyncIterator[str]:
    async for event in await asks.client.responses.create(model="a", input="?", stream=True):
        if event.type == "response.output_text.delta":
            yield event.delta


async def messages(asks: Asks) -> AsyncIterator[str]:
    async with anthropic.AsyncAnthropic(base_url=asks.url, api_key=asks.rollout.secret, max_retries=0) as client:
        more: Any = {"model": "claude", "max_tokens": 99, "messages": [user("?")]}
        async with client.messages.stream(**more) as stream:
            async for piece in stream.text_stream:
                yield piece


FORMATS = pytest.mark.parametrize("format", [chat, completions, responses, messages])
Format = Callable[[Asks], AsyncIterator[str]]


@FORMATS
def test_text_arrives_while_it_is_sampled(format: Format, tmp_path: Path) -> None:
    model = Held(encoder_of(tmp_path, tool_chats.PLAIN), [SAID])

    async def case(asks: Asks) -> None:
        pieces = []
        async for piece in format(asks):
            pieces.append(piece)
            model.read.set()
        assert "".join(pieces) == SAID.removesuffix("<|im_end|>")
        assert len(pieces) > 1 and SAID.startswith(pieces[0]), "the client had text before the turn was over"

    found = played(model, case)
    assert parents(found) == [()]
    check_rows(found, model)


@FORMATS
def test_a_client_that_leaves_in_the_middle_ends_its_turn(format: Format, tmp_path: Path) -> None:
    model = Held(encoder_of(tmp_path, tool_chats.PLAIN), [SAID, "so<|im_end|>"])

    async def case(asks: Asks) -> None:
        async for _ in format(asks):
            break
        await asks.client.close()
        while asks.rollout.asking:
            await asyncio.sleep(0.01)
        asks.client = openai.AsyncOpenAI(base_url=f"{asks.url}/v1", api_key="own", max_retries=0)
        assert (await asks.said(user("?"))).content == "so"

    assert parents(played(model, case)) == [()]
    assert model.cancelled


@FORMATS
def test_an_engine_that_is_lost_in_the_middle_is_an_error_of_the_stream(format: Format, tmp_path: Path) -> None:
    model = Held(encoder_of(tmp_path, tool_chats.PLAIN), [SAID], breaks=True)

    async def case(asks: Asks) -> None:
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine has failed"):
            async for _ in format(asks):
                model.read.set()
        assert asks.rollout.over.is_set() and "the engine has failed" in asks.rollout.error

    with pytest.raises(OSError, match="the engine is gone"):
        played(model, case)


@pytest.mark.parametrize("format", [chat, responses, messages])
def test_what_is_refused_has_its_status_in_a_stream_too(format: Format, tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, "{{ raise_exception('no such role') }}"), ["so<|im_end|>"])

    async def case(asks: Asks) -> None:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="no such role"):
            async for _ in format(asks):
                pass
        await asks.client.completions.create(model="a", prompt="So")

    played(model, case)


def test_log_probs_arrive_with_their_text(tmp_path: Path) -> None:
    model = Held(
        encoder_of(tmp_path, tool_chats.HERMES),
        ['Sum. <tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'],
    )
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    async def case(asks: Asks) -> None:
        said, calls = [], []
        async for chunk in await asks.chat(user("?"), stream=True, logprobs=True, tools=[tool]):
            model.read.set()
            (choice,) = chunk.choices
            said += choice.logprobs.content if choice.logprobs else []
            calls += choice.delta.tool_calls or []
        assert [one.logprob for one in said] == list(model.sampled[0].logprobs)
        assert "".join(one.token for one in said) == model.says[0] and calls[0].function.name == "add"

    assert isinstance(played(model, case), Played)


def test_a_limit_in_a_stream_is_an_empty_reply(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"] * 9)

    async def case(asks: Asks) -> None:
        await asks.said(user("?"))
        for format in (chat, completions, responses, messages):
            assert [piece async for piece in format(asks)] == []

    found = played(model, case, limits=Limits(turns=1))
    assert isinstance(found, Played) and found.episode.cut == "turns"
