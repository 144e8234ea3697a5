"""Several agents of one rollout that ask the gateway: the name of the model says which of them asks (`policy/NAME`)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from test_handing_out import Service, handed_out

from headrace.algo.advantages import agent_returns
from headrace.algo.training_rows import rows_of
from headrace.core.batches import Failure
from headrace.core.types import Prompt, Scored
from headrace.episodes.environments.agents.agent_environment import open_agents
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway import history_trees
from headrace.episodes.environments.gateway.history_trees import GatewayRollout
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.episodes import roll_out, with_rewards
from headrace.episodes.rollout_session import Played
from headrace.web.errors import Refused
from support import tool_chats
from support.gateway.gateway_agent import Asks, parents, played, user
from support.gateway.written_turns import Model, check_rows, encoder_of


def agents(found: Played | Failure) -> list[str]:
    assert isinstance(found, Played), found
    return [turn.agent for turn in found.episode.turns]


async def asked(asks: Asks, model: str, *messages: Any) -> Any:
    reply = await asks.client.chat.completions.create(model=model, messages=list(messages))
    assert reply.model == model
    return reply.choices[0].message


def test_each_role_has_a_path_of_its_own_even_after_the_same_words(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"] * 9)

    async def case(asks: Asks) -> None:
        white = await asked(asks, "policy/white", user("?"))
        black = await asked(asks, "policy/black", user("?"))
        assert white.content == black.content == "so"
        await asked(asks, "policy/white", user("?"), white, user("and?"))
        await asked(asks, "policy/black", user("?"), black, user("and?"))
        await asked(asks, "gpt-5", user("?"), white, user("and?"))

    found = played(model, case)
    assert agents(found) == ["white", "black", "white", "black", ""]
    assert parents(found) == [(), (), (0,), (1,), ()]
    check_rows(found, model)


def test_every_format_names_the_role_by_its_model(tmp_path: Path) -> None:
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"] * 9)

    async def case(asks: Asks) -> None:
        await asks.client.completions.create(model="policy/text", prompt="a")
        await asks.client.responses.create(model="policy/responses", input="a")
        async with anthropic.AsyncAnthropic(base_url=asks.url, api_key=asks.rollout.secret) as client:
            await client.messages.create(model="policy/anthropic", max_tokens=5, messages=[user("a")])
        body = {"model": "policy/tokens", "token_ids": [5, 6], "sampling_params": {"logprobs": 1}}
        await asks.client.post(f"{asks.url}/inference/v1/generate", cast_to=object, body=body)

    assert agents(played(model, case)) == ["text", "responses", "anthropic", "tokens"]


def test_no_two_agents_have_one_name_and_with_it_each_others_rewards() -> None:
    rollout = GatewayRollout(lambda name: (None, None))  # type: ignore[arg-type,return-value]
    sessions = [("solver", "a"), ("solver", "b"), ("judge 2", ""), ("judge", "a"), ("judge", "b"), ("solver", "b")]
    names = [rollout.speaker(role, session).name for role, session in sessions]
    assert names == ["solver", "solver 2", "judge 2", "judge", "judge 3", "solver 2"]
    with pytest.raises(Refused, match="another agent of the name solver 2; give the role another name"):
        rollout.speaker("solver 2")


def test_a_role_needs_a_name_and_there_may_not_be_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_trees, "MOST_SPEAKERS", 2)
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>"] * 9)

    async def case(asks: Asks) -> None:
        for name in ("policy/", f"policy/{'x' * 65}", "policy/a\nb"):
            with pytest.raises(openai.BadRequestError, match="names no role; write policy/ and a name"):
                await asked(asks, name, user("?"))
        await asked(asks, "policy/a", user("?"))
        await asked(asks, "policy/b", user("?"))
        with pytest.raises(openai.BadRequestError, match="has 2 agents already"):
            await asked(asks, "policy/c", user("?"))

    assert agents(played(model, case)) == ["a", "b"]


GAME = """
import json, os, sys
from urllib.request import Request, urlopen

mode = json.load(sys.stdin)["columns"]["mode"]

def ask(role, text):
    body = json.dumps({"model": f"policy/{role}", "messages": [{"role": "user", "content": text}]}).encode()
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

ask("black", ask("white", "begin") + "?")
ask("white", "end")
print(json.dumps({
    "game": {"white": {"won": 1}, "black": {"won": -1}, "moves": 0.2},
    "stranger": {"red": {"won": 1}},
    "nan": {"white": {"won": float("nan")}},
    "deep": {"white": {"won": {"by": 1}}},
    "empty": {"white": {}},
    "twice": {"white": {"won": 1}, "white.won": 2},
}[mode]))
"""


def games(place: Path, mode: str) -> Played | Failure:
    """Plays a game with an agent of two roles, which is a process."""
    (place / "game.py").write_text(GAME)
    encoder = encoder_of(place / "model", tool_chats.PLAIN)
    model = Model(encoder, ["so<|im_end|>"] * 9)
    config = EnvironmentConfig(kind="process", command=(sys.executable, str(place / "game.py")))

    async def whole() -> Played | Failure:
        kind = open_agents(OpenedWith(config=config, encoder=encoder, log=place / "environment.log"))
        try:
            prompt = Prompt("p", "hello", (1,), columns={"mode": mode})
            (one,) = await roll_out(kind, prompt, [0], ask=model, decode=encoder.decode)
            return one
        finally:
            await kind.close()

    return asyncio.run(whole())


def test_a_process_gives_each_of_its_roles_rewards(tmp_path: Path) -> None:
    found = games(tmp_path, "game")
    assert isinstance(found, Played) and agents(found) == ["white", "black", "white"]
    assert found.rewards == {"moves": 0.2} and found.turn_rewards == ({}, {"black.won": -1.0}, {"white.won": 1.0})
    (scored,) = with_rewards([Scored(found.episode, 0.0, {})], [found])
    assert isinstance(scored, Scored)
    assert agent_returns(scored, [0.0] * 3) == {"white": pytest.approx(1.2), "black": pytest.approx(-0.8)}


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("stranger", "gave the role red a reward, and it had no turn: its turns are those of the model policy/red"),
        ("nan", "the reward white.won of a turn is nan"),
        ("deep", "with an object for each role that has rewards of its own"),
        ("empty", "is not a reward"),
        ("twice", "gave the reward white.won twice"),
    ],
)
def test_rewards_of_roles_that_make_no_sense_are_failures(mode: str, words: str, tmp_path: Path) -> None:
    found = games(tmp_path, mode)
    assert isinstance(found, Failure) and found.reason == "environment_reward" and words in found.detail


def test_an_agent_elsewhere_gives_each_of_its_roles_rewards(tmp_path: Path) -> None:
    async def case(service: Service) -> None:
        lease = await service.take()
        names = lease["environment"]
        async with openai.AsyncOpenAI(base_url=names["OPENAI_BASE_URL"], api_key="any") as client:
            for role in ("white", "black"):
                await client.chat.completions.create(model=f"policy/{role}", messages=[user("?")])
        status, answer = await service.post(lease["end"], {"rewards": {"white": {"won": "much"}}})
        assert status == 400, answer
        end = {"rewards": {"white": {"won": 1}, "black": {"won": -1}}}
        assert await service.post(lease["end"], end) == (200, {"ended": True})

    (found,) = handed_out(tmp_path, case)
    assert isinstance(found, Played) and found.rewards == {}
    assert found.turn_rewards == ({"white.won": 1.0}, {"black.won": -1.0})


def test_a_role_that_is_left_out_is_context(tmp_path: Path) -> None:
    """Its tokens are in no loss, those of the others are, and a rollout in which nobody is trained has failed."""
    model = Model(encoder_of(tmp_path, tool_chats.PLAIN), ["so<|im_end|>", "to 12<|im_end|>", "on<|im_end|>"])
    left_out = ["user"]

    async def case(asks: Asks) -> None:
        await asked(asks, "policy/user", user("?"))
        await asked(asks, "policy/solver", user("?"))
        await asked(asks, "policy/user", user("and?"))
        for role in left_out:
            asks.agent.leave_out(role)

    found = played(model, case)
    assert isinstance(found, Played) and [turn.trained for turn in found.episode.turns] == [False, True, False]
    rows = [row for _, row in rows_of(Prompt("p", "?", (1,)), Scored(found.episode, 1.0, {}), 0.5)]
    assert [sum(row.mask) for row in rows] == [0, len(model.sampled[1].tokens), 0]
    left_out.append("solver")
    failed = played(Model(model.encoder, model.says), case)
    assert failed == Failure("environment_turns", "none of the agents that had a turn is trained")
