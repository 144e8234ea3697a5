"""An environment of Atropos in the test's process: it asks as atroposlib 0.4 does, and knows nothing but the address of the run."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from headrace.core.batches import Failure
from headrace.core.types import Completion, Prompt, VersionSpan
from headrace.episodes.environments.atropos.atropos_environment import open_atropos
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.kinds import ADDRESS_FILE
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Played, TurnAsked
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.gateway.gateway_agent import LONGEST
from support.gateway.written_turns import as_sampled, encoder_of

GROUP = 2


@dataclass
class Policy:
    """An engine that says what is written down for each rollout and turn, in tokens of its own choice, under the version of its ticket."""

    encoder: ChatEncoder
    says: Callable[[int, TurnAsked], str]
    sampled: list[tuple[int, TurnAsked, Completion]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    """Holds all turns back until it is set."""

    async def __call__(self, ticket: int, asked: TurnAsked) -> Completion:
        if self.hold:
            await self.hold.wait()
        rng = random.Random(f"{ticket}/{asked.rollout}/{asked.turn}")
        tokens = as_sampled(self.encoder, self.says(ticket, asked), rng)
        logprobs = tuple(-rng.random() for _ in tokens)
        done = Completion(tokens, logprobs, (VersionSpan(0, ticket, ticket),), "stop")
        self.sampled.append((ticket, asked, done))
        return done


@dataclass
class Env:
    """The client: requests of an environment."""

    address: str
    session: aiohttp.ClientSession
    encoder: ChatEncoder

    async def ask(self, method: str, path: str, body: Any = None, packed: bool = False) -> tuple[int, Any]:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        if packed:
            data, headers["Content-Encoding"] = gzip.compress(data), "gzip"
        async with self.session.request(method, f"{self.address}/{path}", data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def generate(self, prompt: Sequence[int], n: int = GROUP, **more: Any) -> list[tuple[int, ...]]:
        """The tokens of each sequence: prompt and completion."""
        body = {"prompt": {"prompt_token_ids": list(prompt)}, "logprobs": 0, "n": n, "temperature": 1.0, **more}
        status, answer = await self.ask("POST", "generate", body)
        assert status == 200, answer
        return [(*prompt, *(int(next(iter(one[0]))) for one in sequence)) for sequence in answer["logprobs"]]

    async def chat(self, *messages: Any, n: int = GROUP) -> list[str]:
        status, answer = await self.ask("POST", "v1/chat/completions", {"messages": messages, "n": n, "model": "x"})
        assert status == 200, answer
        return [choice["message"]["content"] for choice in answer["choices"]]

    async def post(self, sequences: Sequence[Sequence[int]], prompt: int, scores: Sequence[float], **more: Any) -> Any:
        """`prompt`: tokens of each sequence that were not sampled."""
        masks = [[-100] * prompt + list(sequence[prompt:]) for sequence in sequences]
        group = {"tokens": list(map(list, sequences)), "masks": masks, "scores": list(scores), "env_id": 0}
        return await self.ask("POST", "scored_data", {**group, "group_overrides": {}, **more}, packed=True)


Case = Callable[[Env], Awaitable[None]]


def played(
    place: Path,
    case: Case,
    says: Callable[[int, TurnAsked], str],
    *,
    tickets: int = 1,
    hold: Callable[[], asyncio.Event] | None = None,
    group_size: int = GROUP,
    **settings: Any,
) -> tuple[list[list[Played | Failure]], Policy]:
    """The rollouts of each ticket, once `case` has played them."""
    encoder = encoder_of(place / "model", tool_chats.PLAIN)
    policy = Policy(encoder, says)
    config = EnvironmentConfig(kind="atropos", **settings)
    log = place / "environment.log"

    async def whole() -> list[list[Played | Failure]]:
        policy.hold = hold() if hold else None
        kind = open_atropos(
            OpenedWith(
                config=config,
                encoder=encoder,
                sampling={"temperature": 1.0},
                log=log,
                name="tiny",
                steps=9,
                group_size=group_size,
                groups_per_step=2,
                longest=900,
            )
        )
        playing = asyncio.gather(
            *(
                roll_out(
                    kind,
                    Prompt(f"train/{ticket}", "seed", (1,), columns={"seed": ticket}),
                    range(group_size),
                    ask=lambda asked, ticket=ticket: policy(ticket, asked),  # type: ignore[misc]
                    decode=encoder.decode,
                )
                for ticket in range(tickets)
            )
        )
        try:
            async with asyncio.timeout(LONGEST), aiohttp.ClientSession() as session:
                while not (place / ADDRESS_FILE).exists():
                    await asyncio.sleep(0.01)
                await case(Env((place / ADDRESS_FILE).read_text().strip(), session, encoder))
                return list(await playing)
        finally:
            playing.cancel()
            await kind.close()

    return asyncio.run(whole()), policy
