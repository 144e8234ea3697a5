"""Agents that edit what they have said and heard, and change tools, system message and arguments of the template, in three formats: each turn is sampled after what its
request says, with replies as they were sampled (C5)."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from headrace.core.protocols import Limits
from headrace.core.types import Completion
from headrace.episodes.rollout_session import Played, TurnAsked
from support import tool_chats
from support.few import few
from support.gateway.gateway_agent import Asks, played
from support.gateway.written_turns import Model, check_rows, encoder_of

BEGIN = "{% for message in messages %}"
TEMPLATE = tool_chats.HERMES.replace(
    BEGIN, "{% if mode is defined %}<|im_start|>system\n{{ mode }}<|im_end|>\n{% endif %}" + BEGIN, 1
)
PIECES = ("tool", "all", " 1", "add", "bar", "\n", " ", "  ", "to ")
SETS = ((), ("add",), ("add", "bar"), ("bar", "add"))
"""Names of the tools that are offered at a time."""
EDITS = ("", "message", "reply", "dropped", "tools", "tools", "system", "mode", "shortened", "cut", "twice")
FORMATS = ("chat", "chat", "messages", "responses")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}

Message = dict[str, Any]


class Says(Model):
    """Says what comes by chance, with up to two calls."""

    async def __call__(self, asked: TurnAsked) -> Completion:
        chance = random.Random(f"{self.seed}/{asked.turn}")
        said = "".join(chance.choices(PIECES, k=chance.randint(1, 5)))
        for _ in range(chance.choice((0, 0, 1, 2))):
            name = chance.choice(("add", "bar"))
            said += f' <tool_call>{{"name": "{name}",  "arguments": {{"a":{chance.randint(0, 9)}}}}}</tool_call>'
        one = Model(self.encoder, [""] * asked.turn + [said + "<|im_end|>" * (chance.random() < 0.85)], self.seed)
        await asyncio.sleep(0.005 * chance.random())
        done = await one(asked)
        self.asked.append(asked)
        self.sampled.append(done)
        return done


class Request(NamedTuple):
    """A request that was answered."""

    messages: list[Message]
    tools: tuple[str, ...]
    mode: str
    answer: Message


class Editor:
    """One agent."""

    def __init__(self, chance: random.Random, http: aiohttp.ClientSession, url: str) -> None:
        self.chance, self._http, self._url = chance, http, url
        self.answered: list[Request] = []
        self._talks: list[list[Message]] = [[]]
        self._tools: tuple[str, ...] = chance.choice(SETS)
        self._system = self._mode = ""
        self._count = 0

    async def play(self, count: int) -> None:
        for edit in self.chance.choices(EDITS, k=count):
            talk = self._edited([*self.chance.choice(self._talks[-4:])], edit)
            calls = talk[-1].get("tool_calls", ()) if talk else ()
            results = [{"role": "tool", "tool_call_id": call["id"], "content": self._text()} for call in calls]
            talk += self.chance.sample(results, len(results)) or [{"role": "user", "content": self._text()}]
            if edit == "cut":
                await self._ask(talk, 0.01 * self.chance.random())
            await asyncio.gather(*(self._ask(talk) for _ in range(1 + (edit == "twice"))))

    def _edited(self, talk: list[Message], edit: str) -> list[Message]:
        replies = [place for place, message in enumerate(talk) if message["role"] == "assistant"]
        if edit == "tools":
            self._tools = self.chance.choice(SETS)
        elif edit == "system":
            self._system = self.chance.choice(("", self._text()))
        elif edit == "mode":
            self._mode = self.chance.choice(("", "fast", "slow"))
        elif edit == "shortened":
            return talk[: self.chance.randint(0, len(talk))]
        elif edit == "message" and talk:
            place = self.chance.randrange(len(talk))
            talk[place] = {**talk[place], "content": self._text()}
        elif edit == "reply" and replies:
            place = self.chance.choice(replies)
            talk[place] = {**talk[place], "content": talk[place]["content"] + self.chance.choice((" ", "!", "\n"))}
        elif edit == "dropped" and replies:
            gone = talk.pop(self.chance.choice(replies))
            ids = {call["id"] for call in gone.get("tool_calls", ())}
            return [message for message in talk if message.get("tool_call_id") not in ids]
        return talk

    def _text(self) -> str:
        self._count += 1
        return f"{self.chance.choice(PIECES)}={self._count}="

    async def _ask(self, talk: list[Message], patience: float = 100.0) -> None:
        form = self.chance.choice(FORMATS)
        system, tools, mode = self._system, self._tools, self._mode if form == "chat" else ""
        path, body = BODIES[form](talk, system, tools, mode)
        timeout = aiohttp.ClientTimeout(patience)
        try:
            async with self._http.post(
                f"{self._url}/v1/{path}", json={"model": "m", **body}, timeout=timeout
            ) as answer:
                found = await answer.json()
        except TimeoutError:
            return
        if answer.status == 400 and "answers the tool call" in str(found):  # its call was edited away
            return
        assert answer.status == 200, found
        said = {"role": "assistant", **READ[form](found)}
        front = [{"role": "system", "content": system}] if system else []
        self.answered.append(Request([*front, *talk], tools, mode, said))
        if said["content"] or "tool_calls" in said:
            self._talks.append([*talk, said])


# -- the formats ----------------------------------------------------------------------------------------------------------------


def _chat(talk: list[Message], system: str, tools: tuple[str, ...], mode: str) -> tuple[str, Message]:
    front = [{"role": "system", "content": system}] if system else []
    offered = {"tools": [_schema(name) for name in tools]} if tools else {}
    return "chat/completions", {
        "messages": [*front, *talk],
        **offered,
        **({"chat_template_kwargs": {"mode": mode}} if mode else {}),
    }


def _schema(name: str) -> Message:
    return {"type": "function", "function": {"name": name, "description": f"d {name}", "parameters": PARAMETERS}}


def _messages(talk: list[Message], system: str, tools: tuple[str, ...], mode: str) -> tuple[str, Message]:
    said: list[Message] = []
    for message in talk:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            said.append({"role": "user", "content": [block]})
        else:
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            calls = [
                {"type": "tool_use", "id": id, "name": name, "input": json.loads(arguments)}
                for id, name, arguments in _calls(message)
            ]
            said.append({"role": message["role"], "content": [*text, *calls]})
    listed = [{"name": name, "description": f"d {name}", "input_schema": PARAMETERS} for name in tools]
    more = {"system": system} if system else {}
    return "messages", {"messages": said, "max_tokens": 200, **more, **({"tools": listed} if tools else {})}


def _responses(talk: list[Message], system: str, tools: tuple[str, ...], mode: str) -> tuple[str, Message]:
    items: list[Message] = []
    for message in talk:
        if message["role"] == "tool":
            id, text = message["tool_call_id"], message["content"]
            items.append({"type": "function_call_output", "call_id": id, "output": text})
            continue
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        for id, name, arguments in _calls(message):
            items.append({"type": "function_call", "call_id": id, "name": name, "arguments": arguments})
    listed = [{"type": "function", "strict": False, **_schema(name)["function"]} for name in tools]
    more = {"instructions": system} if system else {}
    return "responses", {"input": items, **more, **({"tools": listed} if tools else {})}


def _calls(message: Message) -> list[tuple[str, str, str]]:
    return [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]


def _made(calls: list[tuple[str, str, str]]) -> Message:
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in calls
    ]
    return {"tool_calls": made} if made else {}


def _of_chat(found: Message) -> Message:
    message = found["choices"][0]["message"]
    return {"content": message["content"] or "", **_made(_calls(message))}


def _of_messages(found: Message) -> Message:
    calls = [
        (one["id"], one["name"], json.dumps(one["input"])) for one in found["content"] if one["type"] == "tool_use"
    ]
    return {"content": "".join(one.get("text", "") for one in found["content"]), **_made(calls)}


def _of_responses(found: Message) -> Message:
    texts = [part["text"] for one in found["output"] if one["type"] == "message" for part in one["content"]]
    calls = [
        (one["call_id"], one["name"], one["arguments"]) for one in found["output"] if one["type"] == "function_call"
    ]
    return {"content": "".join(texts), **_made(calls)}


BODIES = {"chat": _chat, "messages": _messages, "responses": _responses}
READ = {"chat": _of_chat, "messages": _of_messages, "responses": _of_responses}


# -- what was asked -------------------------------------------------------------------------------------------------------------


def written(model: Says, request: Request) -> str:
    """The text of a request by the template, without white space: calls are written with other spaces than the model's."""
    names: dict[str, str] = {}
    shown: list[Message] = []
    for message in request.messages:
        one = {**message}
        if calls := _calls(message):
            names |= {id: name for id, name, _ in calls}
            one["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
                for id, name, arguments in calls
            ]
        if message["role"] == "tool":
            one["name"] = names[message["tool_call_id"]]
        shown.append(one)
    tools = [_schema(name) for name in request.tools]
    text = model.encoder.write(shown, tools, {"mode": request.mode} if request.mode else {}, continues=False).text
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("seed", few(range(60), keep=4))
def test_each_turn_is_sampled_after_what_its_request_says(seed: int, tmp_path: Path) -> None:
    model = Says(encoder_of(tmp_path, TEMPLATE), [], seed)
    editors: list[Editor] = []

    async def case(asks: Asks) -> None:
        async with aiohttp.ClientSession() as http:
            editors.extend(Editor(random.Random(f"{seed}/{number}"), http, asks.url) for number in range(2))
            await asyncio.gather(*(editor.play(16) for editor in editors))

    found = played(model, case, limits=Limits(turns=99))
    assert isinstance(found, Played), found
    check_rows(found, model)
    seen = {re.sub(r"\s+", "", model.encoder.written(asked.context)) for asked in model.asked}
    answered = [request for editor in editors for request in editor.answered]
    assert len(answered) > 12
    for request in answered:
        assert written(model, request) in seen, "no turn was sampled after what this request says"
        ids = [id for message in [*request.messages, request.answer] for id, _, _ in _calls(message)]
        assert len(ids) == len(set(ids)), "two calls of one history have one id"
