"""Random programs of agents against the gateway: turns, equal turns, rewritten and shortened histories, requests at once, broken connections and bodies
that mean nothing. What is trained is what was sampled and answered, and nothing else (C5)."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.core.protocols import Limits
from headrace.core.types import Completion
from headrace.episodes.rollout_session import Played, TurnAsked
from support import tool_chats
from support.few import few
from support.gateway.gateway_agent import Asks, played
from support.gateway.written_turns import Model, check_rows, encoder_of

PIECES = ("tool", "all", " 1", "add", "bar", "\n", "x", " ", "  ", "to ")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
NONSENSE = (b"{", b"[]", b'{"messages": 3}', b'{"messages": [{"role": "x"}]}')
MARK = re.compile(r"=\w\d+=")
OPERATIONS = ("ask", "ask", "equal", "rewritten", "shortened", "at once", "broken", "text", "nonsense")


class ByChance(Model):
    """Says what comes by chance. A turn whose request has gone is none."""

    async def __call__(self, asked: TurnAsked) -> Completion:
        chance = random.Random(f"{self.seed}/{asked.turn}")
        said = "".join(chance.choices(PIECES, k=chance.randint(1, 6)))
        if chance.random() < 0.3:
            said += f' <tool_call>{{"name": "add",  "arguments": {{"a":{chance.randint(0, 9)}}}}}</tool_call>'
        one = Model(self.encoder, [""] * asked.turn + [said + "<|im_end|>" * (chance.random() < 0.85)], self.seed)
        await asyncio.sleep(0.01 * chance.random())
        done = await one(asked)
        self.asked.append(asked)
        self.sampled.append(done)
        return done


class Program:
    """One agent. `answered`: the answers with tokens that it got; `broken`: the requests that it left; `marks`: those of each history, by the last
    one: each message that it writes has a mark of its own."""

    def __init__(self, chance: random.Random, http: aiohttp.ClientSession, url: str, model: str) -> None:
        self.chance, self._http, self._url, self._model = chance, http, url, model
        self.answered = self.broken = 0
        self.marks: dict[str, list[str]] = {}
        self._count, self._name = 0, model[-1]
        self._talks: list[list[Any]] = [[]]

    async def play(self, count: int) -> None:
        for operation in self.chance.choices(OPERATIONS, k=count):
            talk = self._next(list(self.chance.choice(self._talks[-3:])), operation)
            if operation == "nonsense":
                assert await self._post("chat/completions", self.chance.choice(NONSENSE)) is None
            elif operation == "text":
                await self._post("completions", {"prompt": self.chance.choice(PIECES) + "q", "max_tokens": 50})
            elif operation == "broken":
                try:
                    async with asyncio.timeout(0.01 * self.chance.random()):
                        await self._ask(talk)
                except TimeoutError:
                    self.broken += 1
            else:
                await asyncio.gather(*(self._ask(talk) for _ in range(1 + (operation in ("equal", "at once")))))

    def _next(self, talk: list[Any], operation: str) -> list[Any]:
        if operation == "rewritten" and talk:
            place = self.chance.randrange(len(talk))
            talk[place] = {**talk[place], "content": self._mark()}
        if operation == "shortened":
            talk = talk[: self.chance.randint(0, len(talk)) // 2 * 2]
        calls = talk[-1].get("tool_calls") if talk else None
        if calls:
            talk += [{"role": "tool", "tool_call_id": call["id"], "content": self._mark()} for call in calls]
        else:
            talk += [{"role": "user", "content": self._mark()}]
        marks = [mark for message in talk for mark in MARK.findall(message["content"] or "")]
        self.marks[marks[-1]] = marks
        return talk

    def _mark(self) -> str:
        self._count += 1
        return f"{self.chance.choice(PIECES)}={self._name}{self._count}="

    async def _ask(self, talk: list[Any]) -> None:
        answer = await self._post("chat/completions", {"messages": talk, "tools": [TOOL]})
        if answer:
            self._talks.append([*talk, answer["choices"][0]["message"]])

    async def _post(self, path: str, body: Any) -> Any:
        """Returns the answer; None if it was refused."""
        data = body if isinstance(body, bytes) else json.dumps({"model": self._model, **body}).encode()
        async with self._http.post(
            f"{self._url}/v1/{path}", data=data, headers={"Content-Type": "application/json"}
        ) as answer:
            assert answer.status in (200, 400), await answer.text()
            if answer.status == 400:
                return None
            found = await answer.json()
        self.answered += found["usage"]["completion_tokens"] > 0
        return found


@pytest.mark.parametrize("seed", few(range(60), keep=6))
def test_what_is_trained_is_what_was_sampled(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    model = ByChance(encoder_of(tmp_path, tool_chats.HERMES), [], seed)
    programs: list[Program] = []

    async def case(asks: Asks) -> None:
        async with aiohttp.ClientSession() as http:
            names = ("policy", "policy/a", "policy/b")[: chance.choice((1, 3))]
            programs.extend(Program(random.Random(f"{seed}/{name}"), http, asks.url, name) for name in names)
            await asyncio.gather(*(program.play(chance.randint(4, 16)) for program in programs))

    found = played(model, case, limits=Limits(turns=chance.choice((4, 99, 99))))
    answered, broken = (sum(getattr(program, name) for program in programs) for name in ("answered", "broken"))
    if not isinstance(found, Played):
        assert not answered or answered + broken >= 4, f"{found}, and its agents had {answered} turns"
        return
    check_rows(found, model)
    assert sorted(turn.completion.tokens for turn in found.episode.turns) == sorted(one.tokens for one in model.sampled)
    marks = {last: all_before for program in programs for last, all_before in program.marks.items()}
    for asked in model.asked:
        if seen := MARK.findall(model.encoder.written(asked.context)):
            assert seen == marks[seen[-1]], "a turn was sampled after other messages than those of its request"
    assert answered <= len(found.episode.turns) <= answered + broken
