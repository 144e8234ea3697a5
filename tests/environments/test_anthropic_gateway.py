"""The gateway, driven by the official `anthropic` client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
import tool_chats
from gateway_agent import Asks, parents, played, user
from written_turns import Model, check_rows, encoder_of

ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
}
CALL = 'I add. <tool_call>{"name": "add",  "arguments": {"a":1}}</tool_call><|im_end|>'


def client_of(asks: Asks) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=asks.url, api_key=asks.rollout.secret, max_retries=0)


def test_a_chat_with_a_tool_extends_the_sampled_tokens_also_from_openais_client(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL, "is 12<|im_end|>", "No.<|im_end|>"])

    async def case(asks: Asks) -> None:
        async with client_of(asks) as client:
            talk: Any = [user("1 and 11?")]
            rest: Any = {"model": "claude", "max_tokens": 50, "system": "You add.", "tools": [ADD]}
            first = await client.messages.create(messages=talk, **rest)
            said, call = first.content
            assert (said.text, first.stop_reason) == ("I add.", "tool_use")
            assert (call.name, call.input) == ("add", {"a": 1}) and first.model == "claude"
            assert first.usage.output_tokens == len(model.sampled[0].tokens)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "12"}
            talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await client.messages.create(messages=talk, **rest)
            assert (second.content[0].text, second.stop_reason) == ("is 12", "end_turn")
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


def test_a_stream_has_the_whole_reply(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL])

    async def case(asks: Asks) -> None:
        rest: Any = {"model": "claude", "max_tokens": 50, "tools": [ADD], "messages": [user("1?")]}
        async with client_of(asks) as client, client.messages.stream(**rest) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "I add." and final.stop_reason == "tool_use" and final.content[1].input == {"a": 1}
        assert final.usage.output_tokens == len(model.sampled[0].tokens)

    assert parents(played(model, case)) == [()]


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    refused: list[tuple[Any, str]] = [
        ({"tool_choice": {"type": "any"}, "tools": [ADD]}, "tool_choice = any is not served"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not served"),
        ({"stop_sequences": ["END"]}, "is not a stop string of the run"),
        ({"messages": [{"role": "user", "content": [image]}]}, "of type image"),
    ]

    async def case(asks: Asks) -> None:
        async with client_of(asks) as client:
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
