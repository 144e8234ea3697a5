"""Tool calls that a policy writes to break what reads them: the run goes on, and what an agent is given it may send back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chat.reading import read_calls
from headrace.core.chat.tool_calls import FORMATS
from headrace.core.protocols import Limits
from headrace.episodes.rollout_session import Played, storable
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.few import few
from support.gateway.gateway_agent import Asks, played, user
from support.gateway.written_turns import Model, check_rows, encoder_of

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}

ARGUMENTS = {
    "more than 64 bits": '{"a": 18446744073709551616}',
    "less than 64 bits": '{"a": -9223372036854775809}',
    "400 digits": '{"a": %s}' % ("9" * 400),
    "5,000 digits": '{"a": %s}' % ("9" * 5000),
    "many bits far inside": '{"a": {"b": [99999999999999999999999]}}',
    "half of a pair": '{"a": "\\ud800"}',
    "half of a pair inside": '{"a": {"b": "\\udfff"}}',
    "half of a pair as a key": '{"\\ud800": 1}',
    "no number": '{"a": NaN}',
    "infinity": '{"a": Infinity}',
    "too large a number": '{"a": 1e999}',
    "zero": '{"a": "\\u0000"}',
    "ninety levels": '{"a": %s}' % ("[" * 90 + "]" * 90),
    "depth": '{"a": %s}' % ("[" * 450 + "]" * 450),
    "great depth": '{"a": %s}' % ("[" * 5000 + "]" * 5000),
    "a list": "[1]",
    "a text": '"x"',
    "twice": '{"a": 1, "a": 2}',
    "no arguments": "",
}


def written(kind: str, arguments: str, name: str = "add") -> str:
    match kind:
        case "qwen3-coder":
            call = f"<function={name}>\n<parameter=a>\n{arguments}\n</parameter>\n</function>"
            return f"<tool_call>\n{call}\n</tool_call><|im_end|>"
        case "gemma":
            return f"<|tool_call>call:{name}{arguments}<tool_call|><|im_end|>"
        case "mistral-named":
            return f"[TOOL_CALLS]{name}[ARGS]{arguments}</s>"
        case "llama3":
            return f'{{"name": "{name}", "parameters": {arguments}}}<|eot_id|>'
        case _:
            return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><|im_end|>'


def with_a_stack_of(frames: int, work: Callable[[], Any]) -> Any:
    return with_a_stack_of(frames - 1, work) if frames else work()


KINDS = {"hermes": "<|im_end|>", "qwen3-coder": "<|im_end|>", "gemma": "<|im_end|>", "mistral-named": "</s>", "llama3": "<|eot_id|>"}  # fmt: skip
"""Format -> the end of a turn."""


@cache
def encoder_for(kind: str) -> ChatEncoder:
    return encoder_of(Path(mkdtemp()), tool_chats.TEMPLATES[kind])


def talked(kind: str, text: str, stream: bool = False) -> None:
    """An agent with an address and no library asks, and asks on with the reply as it was given."""
    encoder = encoder_for(kind)
    model = Model(encoder, [text, f"so{KINDS[kind]}"])

    async def case(asks: Asks) -> None:
        async with aiohttp.ClientSession() as client:

            async def chat(talk: list[Any], **more: Any) -> str:
                body = {"messages": talk, "tools": [ADD], **more}
                async with client.post(f"{asks.url}/v1/chat/completions", json=body) as answer:
                    said = await answer.text()
                    assert answer.status == 200, said
                    return said

            if stream:
                assert (await chat([user("?")], stream=True)).endswith("data: [DONE]\n\n")
                return
            message = json.loads(await chat([user("?")]), parse_constant=pytest.fail)["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "12"} for call in calls]
            await chat([user("?"), message, *(results or [user("go on")])])

    found = played(model, case, limits=Limits(turns=5))
    assert isinstance(found, Played), found
    encoded = msgspec.msgpack.encode(found.episode)
    assert with_a_stack_of(500, lambda: msgspec.msgpack.decode(encoded)), (
        "workers and readers of the journal can read it"
    )
    if not stream:
        assert [turn.parents for turn in found.episode.turns] == [(), (0,)], "the second turn extends the first"
    check_rows(found, model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", few(ARGUMENTS, keep=4))
def test_no_arguments_of_a_call_end_a_run_or_a_conversation(kind: str, what: str) -> None:
    talked(kind, written(kind, ARGUMENTS[what]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", few(["x" * 500, "a b", "", "é"], keep=2))
def test_no_name_of_a_call_ends_a_conversation(kind: str, name: str) -> None:
    talked(kind, written(kind, '{"a": 1}', name))


@pytest.mark.parametrize("what", ["more than 64 bits", "half of a pair", "great depth", "too large a number"])
def test_nor_while_it_is_streamed(what: str) -> None:
    talked("hermes", written("hermes", ARGUMENTS[what]), stream=True)


def test_an_agent_cannot_end_the_run_by_a_number_in_its_history() -> None:
    encoder = encoder_for("hermes")
    model = Model(encoder, ["so<|im_end|>"])
    function = {"name": "add", "arguments": '{"a": 99999999999999999999}'}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    talk = [user("?"), call, {"role": "tool", "tool_call_id": "c", "content": "12"}]

    async def case(asks: Asks) -> None:
        await asks.chat(*talk, tools=[ADD])

    found = played(model, case)
    assert isinstance(found, Played) and msgspec.msgpack.encode(found.episode)
    assert found.episode.turns[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": "99999999999999999999"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_any_message_of_json_can_be_stored_and_is_unchanged_where_msgpack_has_its_numbers(
    message: dict[str, Any],
) -> None:
    kept = storable(message)
    assert msgspec.msgpack.encode(kept)
    if all(-(2**63) <= number < 2**64 for number in integers(message)):
        assert kept == message


def integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from integers(inner)


@given(st.sampled_from(FORMATS), st.data())
def test_every_call_that_is_read_may_be_sent_back(format: Any, data: st.DataObject) -> None:
    pieces = [*format.markers, *ARGUMENTS.values(), "<function=add>", "<parameter=a>", "</parameter>", "</function>"]
    pieces += ["add", "call:add", '{"name": "add", "arguments": ', "}", "{", '"a"', ":", "1", "1e999", "x" * 200, "\n"]
    text = format.opening + "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=9))) + format.closing
    for call in read_calls(text, format, [ADD]).calls:
        assert 1 <= len(call.name) <= 128
        assert isinstance(msgspec.json.decode(call.arguments), dict)
        assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)


def test_nor_by_the_depth_of_its_arguments() -> None:
    encoder = encoder_for("hermes")
    model = Model(encoder, ["so<|im_end|>"])
    deep = '{"a": %s}' % ("[" * 300 + "]" * 300)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": deep}}
    talk = [user("?"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    async def case(asks: Asks) -> None:
        with pytest.raises(openai.BadRequestError, match="arguments of more than 100 levels; nest them less"):
            await asks.chat(*talk, {"role": "tool", "tool_call_id": "c", "content": "12"}, tools=[ADD])
        await asks.chat(user("?"))

    assert isinstance(played(model, case), Played)
