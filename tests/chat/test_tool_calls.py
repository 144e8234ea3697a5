"""Tool calls in completions: which text is a call, what stays text, and that it does not matter how the text arrives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.chat.messages import Message, Tool, described, for_template, uses_tools
from headrace.core.chat.reading import CallReader, Malformed, read_calls
from headrace.core.chat.tool_calls import (
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA,
    HERMES,
    LLAMA,
    MISTRAL,
    QWEN_CODER,
    CallFormat,
    ToolCall,
)
from headrace.core.errors import ConfigError
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.tool_chats import TEMPLATES, save_tokenizer, tokens_of

RAIN = ToolCall("weather", '{"place": "Paris"}')
SUM = ToolCall("add", '{"a": 1, "b": [2, {"c": null}]}')
NOW = ToolCall("now", "{}")
QUOTE = ToolCall("say", r'{"text": "\""}')
SAY = ToolCall("say", r'{"text": "a \"half, {b}: [\\\" <tool_call|>", "on": true}')
HARD = ToolCall("run", r'{"code": "print(\"</tool_call> } ] [TOOL_CALLS] <|python_tag|>\\\")"}')

PLACE = "<parameter=place>\nParis\n</parameter>"

CASES: list[tuple[CallFormat, str, str, list[ToolCall]]] = [
    (HERMES, 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Paris"}}\n</tool_call>', "Let me see.", [RAIN]),
    (HERMES, '<tool_call>{"arguments": {"place": "Paris"}, "name": "weather"}</tool_call>\n', "", [RAIN]),
    (
        HERMES,
        f'<tool_call>{{"name":"weather","arguments":{RAIN.arguments}}}</tool_call>\n'
        f'<tool_call>{{"name":"add","arguments":{SUM.arguments}}}</tool_call> done',
        "done",
        [RAIN, SUM],
    ),
    (HERMES, f'a <tool_call>{{"name": "run", "arguments": {HARD.arguments}}}</tool_call> b', "a b", [HARD]),
    (
        HERMES,
        'a\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call> b',
        "a\n\nb",
        [NOW, NOW],
    ),
    (HERMES, 'a<tool_call>{"name": "now", "arguments": {}}</tool_call>b', "a\nb", [NOW]),
    (HERMES, 'a<tool_call>{"name": "now", "arguments": {}}</tool_call> b', "a b", [NOW]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"place": "Paris"}}', "", [RAIN]),
    (HERMES, "  nothing is called \n", "  nothing is called \n", []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"place": "Paris"}}]', "", [RAIN]),
    (
        MISTRAL,
        f'Hm. [TOOL_CALLS][{{"name": "weather", "arguments": {RAIN.arguments}, "id": "abcdefghi"}}, '
        f'{{"name": "add", "arguments": {SUM.arguments}}}]',
        "Hm.",
        [RAIN, SUM],
    ),
    (
        MISTRAL,
        f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{RAIN.arguments}[TOOL_CALLS]run[ARGS]{HARD.arguments}",
        "",
        [RAIN, HARD],
    ),
    (LLAMA, '{"name": "weather", "parameters": {"place": "Paris"}}', "", [RAIN]),
    (LLAMA, '\n<|python_tag|>{"name": "weather", "parameters": {"place": "Paris"}}', "", [RAIN]),
    (
        LLAMA,
        f'{{"name": "weather", "parameters": {RAIN.arguments}}}; {{"name": "run", "parameters": {HARD.arguments}}}',
        "",
        [RAIN, HARD],
    ),
    (LLAMA, f'First <|python_tag|>{{"name": "add", "arguments": {SUM.arguments}}}', "First", [SUM]),
    (LLAMA, 'It is {"name": "weather", "parameters": {}} then.', 'It is {"name": "weather", "parameters": {}} then.', []),
    (GEMMA, 'Hm. <|tool_call>call:weather{place:<|"|>Paris<|"|>}<tool_call|>', "Hm.", [RAIN]),
    (GEMMA, "<|tool_call>call:add{a:1,b:[2,{c:null}]}<tool_call|><|tool_call>call:now{}<tool_call|>", "", [SUM, NOW]),
    (GEMMA, '<|tool_call>call:say{text:<|"|>a "half, {b}: [\\" <tool_call|><|"|>,on:true}<tool_call|> so', "so", [SAY]),
    (GEMMA, '<|tool_call>call:say{text:<|"|>"<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>', "", [QUOTE, NOW]),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{place:<escape>Paris<escape>}<end_function_call>"
        "<start_function_call>call:move{ by : -1.5e1, <escape>a b<escape>:[] }<end_function_call>",
        "",
        [RAIN, ToolCall("move", '{"by": -15.0, "a b": []}')],
    ),
    (FUNCTION_GEMMA, "<start_function_call>call:weather{place:<escape>Paris<escape>}", "", [RAIN]),
    (QWEN_CODER, f"Hm.\n<tool_call>\n<function=weather>\n{PLACE}\n</function>\n</tool_call>", "Hm.", [RAIN]),
    (QWEN_CODER, f"<tool_call><function=weather>{PLACE}</function><function=now></function></tool_call>", "", [RAIN, NOW]),
    (
        QWEN_CODER,
        "<tool_call>\n<function=write>\n<parameter=text>\n\n  if a < b: \"</tool_call>\n<tool_call>\n\n</parameter>\n"
        "<parameter=to>é</parameter>\n</function>\n</tool_call>\nDone.",
        "Done.",
        [ToolCall("write", json.dumps({"text": '\n  if a < b: "</tool_call>\n<tool_call>\n', "to": "é"}, ensure_ascii=False))],
    ),
    (
        QWEN_CODER,
        "<tool_call><function=write><parameter=text>a</parameter> b</parameter></function></tool_call>",
        "",
        [ToolCall("write", '{"text": "a</parameter> b"}')],
    ),
    (QWEN_CODER, f"<tool_call><function=weather>{PLACE}</function>", "", [RAIN]),
]  # fmt: skip

MALFORMED: list[tuple[CallFormat, str, int]] = [
    (HERMES, '<tool_call>{"name": "weather"}</tool_call>', 1),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"place": "Par</tool_call> so', 1),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>', 1),
    (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>', 1),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {}} {}</tool_call>', 1),
    (HERMES, "x <tool_call>weather(place='Paris')</tool_call>\n\n y\n", 1),
    (HERMES, "<tool_call>" + '{"a":' * 100_000 + "</tool_call>", 1),
    (HERMES, "<tool_call", 0),
    (MISTRAL, "[TOOL_CALLS] []", 1),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {}}] and more', 1),
    (MISTRAL, "[TOOL_CALLS] weather", 1),
    (LLAMA, '{"answer": 42}', 0),
    (LLAMA, '{"name": "weather", "parameters": {"place": "Paris"}} or not', 0),
    (LLAMA, "<|python_tag|>weather.call(place='Paris')", 1),
    (LLAMA, "<|python_tag|> ", 1),
    (LLAMA, "{" * 5000, 0),
    (GEMMA, '<|tool_call>{"name": "weather", "arguments": {}}<tool_call|>', 1),
    (GEMMA, "<|tool_call>call:weather{place:Paris}<tool_call|>", 1),
    (GEMMA, '<|tool_call>call:weather{place:<|"|>Paris}<tool_call|>', 1),
    (GEMMA, "<|tool_call>call:weather{a:1 b:2}<tool_call|>", 1),
    (GEMMA, "<|tool_call>call:weather{a:1,}<tool_call|>", 1),
    (GEMMA, "<|tool_call>call:weather{a:01}<tool_call|>", 1),
    (GEMMA, "<|tool_call>call:weather{}}<tool_call|>", 1),
    (GEMMA, "<|tool_call>call:f{a:" + "[" * 100_000 + "}<tool_call|>", 1),
    (FUNCTION_GEMMA, "<start_function_call>call:{}<end_function_call> x", 1),
    (QWEN_CODER, '<tool_call>{"name": "weather", "arguments": {}}</tool_call>', 1),
    (QWEN_CODER, "<tool_call><function=weather><parameter=place>Par</tool_call> x", 1),
    (QWEN_CODER, f"<tool_call><function=weather>{PLACE}{PLACE}</function></tool_call>", 1),
    (QWEN_CODER, "<tool_call><function=weather>Paris</function></tool_call>", 1),
    (QWEN_CODER, "<tool_call><function=></function></tool_call>", 1),
    (QWEN_CODER, f"<tool_call><function=weather>{PLACE}</tool_call>", 1),
    (QWEN_CODER, "<tool_call></tool_call>", 1),
    (QWEN_CODER, "<tool_call><function=f></function> so</tool_call>", 1),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_calls_are_found_in_the_formats_of_their_families(
    format: CallFormat, text: str, content: str, calls: Sequence[ToolCall]
) -> None:
    said = read_calls(text, format)
    assert (said.content, list(said.calls), said.malformed) == (content, list(calls), ())
    for call in said.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(("format", "text", "told"), MALFORMED)
def test_a_malformed_call_stays_text_as_it_was_written(format: CallFormat, text: str, told: int) -> None:
    said = read_calls(text, format)
    assert (said.content, said.calls, len(said.malformed)) == (text, (), told)
    assert all(one.text in text and one.why for one in said.malformed)


def test_a_good_call_after_a_malformed_one_is_a_call() -> None:
    good = f'<tool_call>{{"name": "weather", "arguments": {RAIN.arguments}}}</tool_call>'
    bad = '<tool_call>{"name": "weather", "arguments": {"place": "Paris}}</tool_call>'
    said = read_calls(f"{bad}\n{good}", HERMES)
    assert (said.content, said.calls) == (bad, (RAIN,))
    assert [one.text for one in said.malformed] == [bad]


PARTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name": "f", "arguments": {"x": "',
    '"}}',
    "f",
]
PARTS += ["<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "a:", "1", "}", "<escape>", "<start_function_call>"]
PARTS += ["<end_function_call>", "<function=f>", "<parameter=x>", "</parameter>", "</function>"]
PARTS += ['{"name": "f", "parameters": {}}', "[", "]", '{"', '"', "\\", " ", "\n", "; ", "é", "<", "words", '{"x": 1}']


@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_pieces_are_read_as_the_whole_is(format: CallFormat, text: str, sizes: list[int]) -> None:
    reader, events, at, turn = CallReader(format), [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        events += reader.push(text[at : at + size], last=False)
        at, turn = at + size, turn + 1
    events += reader.push("", last=True)
    said = read_calls(text, format)
    assert "".join(event for event in events if isinstance(event, str)) == said.content
    assert tuple(event for event in events if isinstance(event, ToolCall)) == said.calls
    assert tuple(event for event in events if isinstance(event, Malformed)) == said.malformed
    assert said.calls or said.content == text


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_calls_of_real_forms_are_read_character_by_character(
    format: CallFormat, text: str, content: str, calls: Sequence[ToolCall]
) -> None:
    reader, events, seen = CallReader(format), [], []
    for place, character in enumerate(text):
        events += reader.push(character, last=place == len(text) - 1)
        seen += [place] if any(isinstance(event, ToolCall) for event in events) and not seen else []
    assert "".join(event for event in events if isinstance(event, str)) == content
    assert [event for event in events if isinstance(event, ToolCall)] == calls
    if format is HERMES and "</tool_call> done" in text:
        assert seen == [text.index("</tool_call>") + len("</tool_call>") - 1], (
            "a call is not kept waiting for the next one"
        )


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "on": {"type": "boolean"},
        "text": {"type": "string"},
        "many": {"type": "array", "items": {}},
        "map": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "null"]},
        "level": {"enum": [1, 2]},
        "word": {"enum": ["1", "2"]},
        "mode": {"$ref": "#/$defs/Mode"},
        "round": {"$ref": "#/$defs/Round"},
        "free": {},
    },
    "$defs": {"Mode": {"enum": ["1"], "type": "string"}, "Round": {"$ref": "#/$defs/Round"}},
}
TYPED = [
    ("n", "12", 12), ("n", " -3 ", -3), ("n", "4.0", 4), ("n", "4.5", "4.5"), ("n", "many", "many"), ("n", "true", "true"),
    ("x", "12", 12), ("x", "1e3", 1000.0), ("x", "NaN", "NaN"), ("x", "", ""),
    ("on", "True", True), ("on", "false", False), ("on", "1", "1"),
    ("text", "12", "12"), ("text", "null", "null"), ("text", " a\n", " a\n"), ("text", '{"a": 1}', '{"a": 1}'),
    ("many", "[1, {}]", [1, {}]), ("many", "1, 2", "1, 2"), ("map", '{"a": null}', {"a": None}), ("map", "[]", "[]"),
    ("maybe", "None", None), ("maybe", "7", 7), ("either", "null", None), ("either", "7", "7"),
    ("level", "2", 2), ("word", "2", "2"), ("mode", "1", "1"), ("round", "1", "1"), ("free", "1", "1"), ("unknown", "1", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "written", "value"), TYPED)
def test_the_schema_says_what_a_plain_value_is(name: str, written: str, value: object) -> None:
    tools = [
        {"type": "function", "function": {"name": "other"}},
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    ]
    text = f"<tool_call>\n<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = read_calls(text, QWEN_CODER, tools).calls
    read = json.loads(call.arguments)[name]
    assert (type(read), read) == (type(value), value)
    (untyped,) = read_calls(text, QWEN_CODER).calls
    assert json.loads(untyped.arguments) == {name: written}


# --- the template chooses the format -----------------------------------------------------------------------------------


EXPECTED = {"hermes": HERMES, "mistral-list": MISTRAL, "mistral-named": MISTRAL, "llama3": LLAMA}
EXPECTED |= {"gemma": GEMMA, "function-gemma": FUNCTION_GEMMA, "qwen3-coder": QWEN_CODER}
SHOWN = {
    "qwen3-coder": "<parameter=place>\nParis\n</parameter>",
    "gemma": '{place:<|"|>Paris<|"|>}',
    "function-gemma": "{place:<escape>Paris<escape>}",
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_template_chooses_the_format_and_renders_tools_calls_and_answers(family: str, tmp_path: Path) -> None:
    encoder = ChatEncoder(save_tokenizer(tmp_path, TEMPLATES[family]))
    assert encoder.call_format is EXPECTED[family]
    text, tokens = encoder.encode_messages(for_template(TALK), described(TOOLS))
    assert list(tokens) == tokens_of(text)
    assert '"weather"' in text and "The weather of a place" in text, "the tool is shown"
    assert SHOWN.get(family, '{"place": "Paris"}') in text, "arguments are an object, not the text of one"
    assert "rain" in text and text.index("Paris") < text.index("rain")
    plain, _ = encoder.encode_messages(for_template(TALK[:1]))
    assert "tool" not in plain.lower()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (tool_chats.PLAIN, "does not show tools"),
        (tool_chats.XML, "a format that is not read here"),
        ("{% if tools %}{{ raise_exception('no tools, please') }}{% endif %}", "refuses tools: no tools, please"),
        ("{{ tools }}{{ messages[1].tool_calls[0].text.upper() }}", "refuses a call of one"),
    ],
)
def test_a_template_without_tools_is_refused_with_the_reason(template: str, words: str, tmp_path: Path) -> None:
    template = template.replace(
        "messages[1]", "(messages[1] if messages | length > 1 else {'tool_calls': [{'text': ''}]})"
    )
    with pytest.raises(ConfigError, match=words):
        _ = ChatEncoder(save_tokenizer(tmp_path, template)).call_format


def test_special_tokens_that_mark_a_call_stay_in_the_text_and_others_go(tmp_path: Path) -> None:
    shows = ChatEncoder(save_tokenizer(tmp_path, TEMPLATES["mistral-named"]))
    tokens, hides = tokens_of("[TOOL_CALLS]weather[ARGS]{}</s><|python_tag|>"), shows.with_special_tokens("hide")
    assert hides.decode_showing(MISTRAL.markers)(tokens) == "[TOOL_CALLS]weather[ARGS]{}"
    assert hides.decode(tokens) == "weather{}"
    assert (
        shows.decode_showing(MISTRAL.markers)(tokens)
        == shows.decode(tokens)
        == "[TOOL_CALLS]weather[ARGS]{}<|python_tag|>"
    )


# --- messages ----------------------------------------------------------------------------------------------------------

TOOLS = msgspec.convert(
    [{"type": "function", "function": {"name": "weather", "description": "The weather of a place"}}], list[Tool]
)
TALK = msgspec.convert(
    [
        {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "it?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abcdefghi", "function": {"name": "weather", "arguments": '{"place": "Paris"}'}}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
    ],
    list[Message],
)


def test_messages_have_the_form_that_templates_read() -> None:
    asked, called, answered = for_template(TALK)
    assert asked == {"role": "user", "content": "How is it?"}, "and no field that is not set"
    assert called["content"] == "" and called["tool_calls"] == [
        {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "Paris"}}}
    ]
    assert answered == {"role": "tool", "content": "rain", "tool_call_id": "abcdefghi", "name": "weather"}
    assert uses_tools(TALK) and uses_tools(TALK[2:]) and not uses_tools(TALK[:1])
    assert described(TOOLS)[0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "other"}, r"messages\[3\] answers the tool call other"),
        ({"role": "tool", "content": "x"}, "answers the tool call None"),
        ({"role": "user", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}, "only an assistant"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}]}, "not a JSON object"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{" * 99}}]}, "not a JSON"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text"),
    ],
)  # fmt: skip
def test_messages_that_do_not_fit_together_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        for_template([*TALK, msgspec.convert(change, Message)])
