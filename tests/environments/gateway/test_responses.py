"""`/v1/responses` of the gateway, driven by the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.core.protocols import Limits
from headrace.episodes.rollout_session import Played
from support import tool_chats
from support.gateway.gateway_agent import Asks, parents, played, user
from support.gateway.written_turns import Model, check_rows, encoder_of

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
    "strict": True,
}
CALL = 'I add. <tool_call>{"name": "add",  "arguments": {"a":1}}</tool_call><|im_end|>'


async def respond(asks: Asks, input: Any, **more: Any) -> Any:
    return await asks.client.responses.create(model="gpt-5", input=input, **more)


def test_items_that_are_sent_back_extend_the_sampled_tokens(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL, "is 12<|im_end|>", "No.<|im_end|>"])

    async def case(asks: Asks) -> None:
        more: Any = {"tools": [ADD], "instructions": "You add.", "store": False}
        items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1 and 11?"}]}]
        first = await respond(asks, items, **more)
        said, call = first.output
        assert (said.content[0].text, first.output_text) == ("I add.", "I add.") and first.status == "completed"
        assert (call.name, call.arguments) == ("add", '{"a":1}') and first.model == "gpt-5"
        assert first.usage.input_tokens == len(model.asked[0].context)
        assert first.usage.output_tokens == len(model.sampled[0].tokens) and first.temperature == 1.0
        items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "12"}]
        second = await respond(asks, items, **more)
        assert second.output_text == "is 12"
        items += [*second.output, {"role": "user", "content": "sure?"}]
        assert (await respond(asks, items, **more)).output_text == "No."

    found = played(model, case)
    assert parents(found) == [(), (0,), (1,)]
    check_rows(found, model)
    text = model.encoder.written(model.asked[0].context)
    assert "You add." in text and "1 and 11?" in text and '"add"' in text


def test_a_stored_response_is_continued_by_its_id(tmp_path: Path) -> None:
    """The instructions are not stored: they are sent each time."""
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL, "is 12<|im_end|>", "No.<|im_end|>", "so<|im_end|>"])

    async def case(asks: Asks) -> None:
        more: Any = {"tools": [ADD], "instructions": "You add."}
        first = await respond(asks, "1 and 11?", **more)
        result: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "12"}
        second = await respond(asks, [result], previous_response_id=first.id, **more)
        third = await respond(asks, "sure?", previous_response_id=second.id, store=False, **more)
        assert (second.output_text, third.output_text) == ("is 12", "No.")
        await respond(asks, "why?", previous_response_id=second.id, tools=[ADD])
        for unknown in (third.id, "resp_of_another"):
            with pytest.raises(openai.BadRequestError, match="names no stored response; send all"):
                await respond(asks, "more?", previous_response_id=unknown)

    found = played(model, case)
    assert parents(found) == [(), (0,), (1,), ()]
    check_rows(found, model)
    assert "You add." not in model.encoder.written(model.asked[3].context)


def test_a_chat_goes_on_as_a_response(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>", "no<|im_end|>"])

    async def case(asks: Asks) -> None:
        first = await asks.said(user("?"))
        assert (await respond(asks, [user("?"), first.model_dump(), user("really?")])).output_text == "no"

    found = played(model, case)
    assert parents(found) == [(), (0,)]


def test_a_stream_is_what_the_clients_own_reader_expects(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [CALL, CALL.removeprefix("I add. "), "<|im_end|>"])

    async def case(asks: Asks) -> None:
        for text in ("I add.", "", ""):
            kinds = []
            async with asks.client.responses.stream(
                model="a", input="1?", tools=[ADD], include=["message.output_text.logprobs"]
            ) as stream:
                async for event in stream:
                    kinds.append(event.type)
                    assert event.sequence_number == len(kinds) - 1
                final = await stream.get_final_response()
            assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
            done = model.sampled[len(model.asked) - 1]
            assert final.output_text == text and final.usage.output_tokens == len(done.tokens)
            calls = [one for one in final.output if one.type == "function_call"]
            assert [call.arguments for call in calls] == (['{"a":1}'] if len(model.asked) < 3 else [])
            if text:
                said = final.output[0].content[0]
                assert [logprob.logprob for logprob in said.logprobs] == list(done.logprobs)

    assert parents(played(model, case)) == [(), (), ()]


def test_a_response_that_is_cut_off_is_incomplete(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so", "so"])

    async def case(asks: Asks) -> None:
        one = await respond(asks, "?", max_output_tokens=2)
        assert (one.status, one.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        kinds = [event.type async for event in await respond(asks, "?", stream=True)]
        assert kinds[-1] == "response.incomplete"
        limit = await respond(asks, "?")
        assert (limit.status, limit.output_text) == ("incomplete", "")

    found = played(model, case, limits=Limits(turns=2))
    assert isinstance(found, Played) and found.episode.cut == "turns" and model.asked[0].most == 2


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.HERMES), [])
    image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
    refused: list[tuple[Any, str]] = [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type web_search is not served"),
        ({"reasoning": {"effort": "high"}}, "reasoning is not served"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type = 'xml' is none"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is not served"),
        ({"include": ["file_search_call.results"]}, "include = file_search_call.results is not served"),
        ({"background": True}, "background is not served"),
        ({"truncation": "auto"}, "environment.max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs is not served"),
        ({"conversation": "conv_1"}, "use previous_response_id"),
        ({"max_output_tokens": 0}, "asks for nothing"),
        ({"input": []}, "input has no messages"),
        (
            {"input": [image]},
            "of type input_image; only text is served; a run shows images of its rows, by task.images",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "an item of type item_reference is not served"),
        ({"extra_body": {"seed": 3}}, "unknown field `seed`"),
    ]

    async def case(asks: Asks) -> None:
        for more, words in refused:
            with pytest.raises(openai.BadRequestError) as error:
                await respond(asks, **{"input": "?", **more})
            assert words in str(error.value)

    played(model, case)
    assert not model.asked
