"""A completion becomes text and tool calls, whole or while it arrives.

A call is returned when its section is complete: a malformed one stays text, exactly as the model wrote it, and that is known only then.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.core.chat.tool_calls import FORMATS, CallFormat, ToolCall
from headrace.core.errors import ConfigError

# --- The thinking of a model
# The thinking of a model, which stands between two marks before its answer, as the models of Qwen, DeepSeek and others write it.


OPENING, CLOSING = "<think>", "</think>"
MARKS = (OPENING, CLOSING)
"""Texts of tokens that must stay in the decoded text, even where the tokenizer calls them special."""


class Thought(NamedTuple):
    reasoning: str
    answer: str


def is_known_to(template: str) -> bool:
    """Whether a chat template is one of a model that thinks: it writes the end of a thought, or looks for it."""
    return CLOSING in template


def is_open_in(text: str) -> bool:
    """Whether the thinking has begun and not ended in the beginning of an answer."""
    return text.rfind(OPENING) > text.rfind(CLOSING)


def behind_thinking(text: str, begun: bool = False) -> str:
    """Returns what a completion says when it has thought: all of it if it does not think, nothing if its thinking has no end. `begun`: whether the
    prompt ends within the thinking."""
    return "" if is_open_in(text) or (begun and CLOSING not in text) else text.rpartition(CLOSING)[2]


def is_opened_by(prompt: str) -> bool:
    """Whether a prompt ends within the model's thinking, because its template has opened it: the mark is the last thing there. One that stands
    before may be in the text of anybody, and opens nothing."""
    return prompt.rstrip().endswith(OPENING)


class ThoughtReader:
    """Splits one completion in pieces. What is read is the same however the text is cut.

    Thinking is what stands at the beginning, up to the closing mark. The new lines beside the marks belong to neither part: templates write
    them themselves."""

    def __init__(self, begun: bool) -> None:
        """`begun`: whether the prompt ends within the thinking."""
        self._inside: bool | None = True if begun else None
        """None: not known yet."""
        self.began, self.ended = begun, False
        """Whether there was thinking, and whether it has ended."""
        self._rest = ""
        """Text that is not decided yet."""
        self._bare = True
        """Whether the part that is being read has no character yet."""

    def push(self, text: str, last: bool) -> Thought:
        """Returns the text that later text cannot change. `last`: no more text follows."""
        self._rest += text
        if self._inside is None:
            self._begin(last)
        reasoning = self._reasoning(last) if self._inside else ""
        return Thought(reasoning, self._answer() if self._inside is False else "")

    def _begin(self, last: bool) -> None:
        begun = self._rest.lstrip()
        if begun.startswith(OPENING):
            self._inside, self.began, self._rest = True, True, begun.removeprefix(OPENING)
        elif last or not OPENING.startswith(begun):
            self._inside, self._bare = False, False  # an answer without a thought stays as it is

    def _reasoning(self, last: bool) -> str:
        if self._bare:
            self._rest = self._rest.lstrip("\n")
        place = self._rest.find(CLOSING)
        if place >= 0:
            text, self._rest = self._rest[:place].rstrip("\n"), self._rest[place + len(CLOSING) :]
            self._inside, self._bare, self.ended = False, True, True
            return text
        held = 0 if last else next((n for n in range(len(CLOSING) - 1, 0, -1) if self._rest.endswith(CLOSING[:n])), 0)
        end = len(self._rest[: len(self._rest) - held].rstrip("\n"))
        text, self._rest = self._rest[:end], self._rest[end:]
        self._bare = self._bare and not text
        return text

    def _answer(self) -> str:
        text, self._rest = self._rest.lstrip("\n") if self._bare else self._rest, ""
        self._bare = self._bare and not text
        return text


def end_of_thought(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], spell: Callable[[int], bytes]) -> int:
    """Returns the number of tokens up to the end of the thinking, which has ended in them, with its mark. `decode`: shows the marks; `spell`:
    the bytes of a token. Most vocabularies have the mark as one token; otherwise a few prefixes are decoded."""
    mark = CLOSING.encode()
    place = next((place for place, token in enumerate(tokens, 1) if spell(token) == mark), 0)
    if place and CLOSING not in decode(tokens[: place - 1]):
        return place
    return bisect_left(range(len(tokens)), True, key=lambda end: CLOSING in decode(tokens[:end]))


# --- reading ------------------------------------------------------------


@dataclass(frozen=True)
class Malformed:
    """A section that holds no call. Its text is content too."""

    text: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Said:
    """A whole completion."""

    content: str
    """The text outside the calls; unchanged where there is no call. Where there are texts before and behind calls, the white space that stood
    between them and the calls (a new line, if there was none) keeps them apart."""
    calls: tuple[ToolCall, ...]
    malformed: tuple[Malformed, ...]


Event = str | ToolCall | Malformed


def read_calls(text: str, format: CallFormat, tools: Sequence[Mapping[str, Any]] = ()) -> Said:
    """`tools`: those that were offered, in OpenAI's form."""
    events = CallReader(format, tools).push(text, last=True)
    return Said(
        content="".join(event for event in events if isinstance(event, str)),
        calls=tuple(event for event in events if isinstance(event, ToolCall)),
        malformed=tuple(event for event in events if isinstance(event, Malformed)),
    )


class CallReader:
    """Reads one completion in pieces. Its events are the same however the text is cut."""

    def __init__(self, format: CallFormat, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: those that were offered, in OpenAI's form."""
        self._format, self._tools = format, tools
        self._end = format.closing or format.opening
        escapes = r"\\.|" if format.quotes[0] == '"' else ""
        marks = {*format.quotes, self._end}
        self._stops = re.compile(escapes + "|".join(map(re.escape, marks)), re.DOTALL)
        self._longest = max(map(len, marks))
        self._rest = ""
        """Text that is not decided yet."""
        self._inside = False
        """Whether the rest begins with a section."""
        self._begun = not format.bare
        """Whether there was any text but white space."""
        self._gap, self._after_call = "", False
        """White space that goes if a call follows; whether the last event was a call."""
        self._said, self._apart = False, ""
        """Whether there was text before; the white space between it and the first call behind it."""
        self._reset()

    def _reset(self) -> None:
        self._scanned, self._quoted, self._first = 0, False, -1
        """Characters of the section that were searched for its end; whether they end inside a string; the first end inside one."""

    def push(self, text: str, last: bool) -> list[Event]:
        """Returns text and calls that later text cannot change. `last`: no more text follows."""
        self._rest += text
        events = [event for event in self._events(last) if event != ""]
        if last and not self._after_call and self._gap:
            events.append(self._gap)
        return events

    def _events(self, last: bool) -> Iterator[Event]:
        while True:
            if not self._inside:
                place, self._inside = self._opening(last)
                text, self._rest = self._rest[:place], self._rest[place:]
                yield self._say(text)
            if not self._inside or (end := self._section_end(last)) < 0:
                return
            section, self._rest = self._rest[:end], self._rest[end:]
            self._inside = False
            self._reset()
            yield from self._read(section)

    def _opening(self, last: bool) -> tuple[int, bool]:
        """The place where a section begins (True), or up to which there is none (False)."""
        stripped = self._rest.lstrip()
        if not self._begun:
            if stripped.startswith("{"):
                self._begun = True
                return len(self._rest) - len(stripped), True
            if not stripped and not last:
                return 0, False
            self._begun = bool(stripped)
        place = self._rest.find(self._format.opening)
        if place >= 0:
            return place, True
        return len(self._rest) - (0 if last else _overlap(self._rest, self._format.opening)), False

    def _section_end(self, last: bool) -> int:
        """The length of the section with its closing marker; -1: not known yet. A marker inside a JSON string is none."""
        start = len(self._format.opening) if self._rest.startswith(self._format.opening) else 0
        safe = len(self._rest) if last else len(self._rest) - self._longest + 1  # a marker may be cut at the end
        for found in self._stops.finditer(self._rest, max(self._scanned, start)):
            if found.start() >= safe:
                break
            self._scanned = found.end()
            if found[0] == self._format.quotes[self._quoted]:
                self._quoted = not self._quoted
            elif found[0] == self._end:
                if not self._quoted:
                    return found.end() if self._format.closing else found.start()
                self._first = found.start() if self._first < 0 else self._first
        self._scanned = max(self._scanned, start, safe)
        if not last:
            return -1
        if self._first < 0 or not self._quoted:
            return len(self._rest)
        return self._first + (len(self._end) if self._format.closing else 0)  # a string that never ends hides nothing

    def _read(self, section: str) -> Iterator[Event]:
        inner = section.removeprefix(self._format.opening)
        inner = inner.removesuffix(self._format.closing) if self._format.closing else inner
        try:
            calls = self._format.calls(inner, self._tools)
        except ValueError as error:
            yield self._say(section)
            if section.startswith(self._format.opening):  # an object without a marker may be an answer
                yield Malformed(section, str(error))
            return
        self._apart = self._apart or self._gap
        self._gap, self._after_call = "", True
        yield from calls

    def _say(self, text: str) -> str:
        """Returns text that is shown now: without white space at its end, which waits for what follows."""
        text = self._gap + text
        shown = (text.lstrip() if self._after_call else text).rstrip()
        if not shown:
            self._gap = text
            return ""
        if self._after_call and self._said:
            shown = (self._apart or text[: len(text) - len(text.lstrip())] or "\n") + shown
        self._gap, self._after_call, self._said, self._apart = text[len(text.rstrip()) :], False, True, ""
        return shown


def _overlap(text: str, marker: str) -> int:
    """The number of characters at the end of the text with which the marker begins."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)


# --- The format of tool calls that a chat template uses. A template is a program
# It is shown a tool and a call, and what it writes is read.


Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""(messages, tools) -> what the template writes. It may raise anything."""

_QUESTION, _TOOL, _ARGUMENT = "headrace asks", "headrace_probe", "headrace_value"
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "a text"}}, "required": ["x"]}
_TOOLS = [
    {"type": "function", "function": {"name": _TOOL, "description": "a probe", "parameters": _PARAMETERS}},
]
_ASKING: dict[str, Any] = {"role": "user", "content": _QUESTION}
_CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    # Mistral's templates want an id of nine letters and digits
    "tool_calls": [{"id": "headrace0", "type": "function", "function": {"name": _TOOL, "arguments": {"x": _ARGUMENT}}}],
}


def tools_problem(render: Render, whose: str) -> str:
    """Says why the template shows no tools; empty if it does. `whose`: it, in the sentence."""
    try:
        offered = render([_ASKING], _TOOLS)
    except Exception as error:  # a template is a program of the model's author
        return f"the chat template of {whose} refuses tools: {error}"
    if _TOOL in offered:
        return ""
    return (
        f"the chat template of {whose} does not show tools to the model; use a model whose template does, or write them into a "
        "system message and read the calls from the text"
    )


def format_of(render: Render, whose: str) -> CallFormat:
    """Raises ConfigError where the template shows no tools, or writes calls as no format here does. `whose`: it, in the sentence."""
    if problem := tools_problem(render, whose):
        raise ConfigError(problem)
    try:
        written = render([_ASKING, _CALLING], _TOOLS)
    except Exception as error:
        raise ConfigError(f"the chat template of {whose} shows tools and refuses a call of one: {error}") from None
    for format in FORMATS:
        if _reads(format, written.rpartition(_QUESTION)[2]):
            return format
    known = ", ".join(format.name for format in FORMATS)
    raise ConfigError(
        f"the chat template of {whose} writes tool calls in a format that is not read here (those of {known} are); leave tools out, and "
        "read the calls from the text"
    )


def _reads(format: CallFormat, answer: str) -> bool:
    """Whether the format reads the call from the template's rendering of an answer, which has an end of turn behind the call."""
    if not format.closing:
        answer = answer[: max(answer.rfind("]"), answer.rfind("}")) + 1]
    if format.bare and format.opening not in answer:
        answer = answer[max(answer.find("{"), 0) :]
    reply = read_calls(answer, format)
    return [(call.name, _plain(call)) for call in reply.calls] == [(_TOOL, f'{{"x":"{_ARGUMENT}"}}')]


def _plain(call: ToolCall) -> str:
    return "".join(call.arguments.split())
