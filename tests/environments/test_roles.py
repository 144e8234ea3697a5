"""Several agents in one rollout: the same policy in different roles, each with a conversation, tools and rewards of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.core.batches import Failure
from headrace.core.types import Scored
from headrace.episodes.episodes import Played, with_rewards
from headrace.loop.ledger import talk_of
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.tool_chats import CALL, WrittenEngine, play_all

GAME = '''
def look(square: str) -> str:
    """Looks at a square.

    Args:
        square: the square
    """
    return "empty"

async def play(agent, prompt, **columns):
    white, black = agent.role("white"), agent.role("black")
    assert white is agent.role("white") and (agent.name, white.name) == ("", "white")
    first = await white.chat("You are white.", tools=[look])
    answer = await black.chat([{"role": "system", "content": "You are black."}, {"role": "user", "content": first.text}])
    second = await white.chat(answer.text)
    if second.tool_calls:
        second = await white.chat(await white.call(second))
    white.reward("won", 1)
    black.reward("won", -1)
    return {"long": len(second.text) / 10}

def plain(agent, prompt, **columns):
    white, black = agent.role("white"), agent.role("black")
    answer = black.chat(white.chat("You are white.").text)
    white.chat(answer.text)
    white.reward("won", 1)
    return {"said": 0.5}

async def judged(agent, prompt, **columns):
    said = await agent.chat(prompt)
    await agent.role("judge").chat(said.text)
    agent.reward("good", 2)
    return 0

async def nobody(agent, prompt):
    agent.role("")

async def nested(agent, prompt):
    agent.role("white").role("left hand")

async def early(agent, prompt):
    await agent.chat(prompt)
    agent.role("white").reward("won", 1)
    return 0
'''


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("env") / "env.py"
    path.write_text(GAME)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(tool_chats.save_tokenizer(tmp_path_factory.mktemp("tokens"), tool_chats.HERMES))


def played(
    env: Path, encoder: ChatEncoder, function: str, *message: str, **config: Any
) -> tuple[Played, WrittenEngine]:
    engine = WrittenEngine(*(f"{one}<|im_end|>" for one in message))
    (found,) = play_all(env, encoder, [({}, engine)], function=function, **config)
    assert isinstance(found, Played), found
    return found, engine


def test_each_role_has_a_conversation_of_its_own(env: Path, encoder: ChatEncoder) -> None:
    looks = CALL.replace("NAME", "look").replace("ARGUMENTS", '{"square": "a1"}').removesuffix("<|im_end|>")
    found, engine = played(env, encoder, "play", "e4", "e5", looks, "Nf3")
    turns = found.episode.turns
    assert [turn.agent for turn in turns] == ["white", "black", "white", "white"]
    assert [turn.parents for turn in turns] == [(), (), (0,), (2,)]
    asked = [encoder.written(one.context) for one in engine.asked]
    assert "You are black." in asked[1] and "You are white." not in asked[1] and "look" not in asked[1]
    assert "You are white." in asked[2] and "e4" in asked[2] and "You are black." not in asked[2]
    assert asked[3].startswith(asked[2]) and "empty" in asked[3], "the tokens of its own path, exactly"
    assert found.turn_rewards == ({}, {"black.won": -1.0}, {}, {"white.won": 1.0}) and found.rewards == {"long": 0.3}


def test_roles_are_no_forks_of_a_template(env: Path, encoder: ChatEncoder) -> None:
    found, _ = played(env, encoder, "plain", "e4", "e5", "Nf3")
    assert talk_of([found.episode]) == {"turns": 3, "forked": 0, "calls": 0, "later": 2, "met": 0}
    assert found.turn_rewards == ({}, {}, {"white.won": 1.0})
    (scored,) = with_rewards([Scored(found.episode, 0.0, {})], [found])
    assert isinstance(scored, Scored) and scored.rewards == {"said": 0.5, "white.won": 1.0} and scored.reward == 1.5


def test_a_reward_is_of_its_agents_last_turn_not_of_the_last_one(env: Path, encoder: ChatEncoder) -> None:
    found, _ = played(env, encoder, "judged", "12", "right")
    assert [turn.agent for turn in found.episode.turns] == ["", "judge"]
    assert found.turn_rewards == ({"good": 2.0}, {})


@pytest.mark.parametrize(
    ("function", "failure", "words"),
    [
        ("nobody", "environment_raised", "role was given ''; name a role"),
        ("nested", "environment_raised", "ask the agent that the function was called with"),
        ("early", "environment_reward", "gave the reward white.won to a turn before there was one"),
    ],
)
def test_what_a_function_does_wrong_with_roles_is_said(
    env: Path, encoder: ChatEncoder, function: str, failure: str, words: str
) -> None:
    (found,) = play_all(env, encoder, [({}, WrittenEngine("12<|im_end|>"))], function=function)
    assert isinstance(found, Failure) and found.reason == failure and words in found.detail


def test_the_limit_of_turns_counts_those_of_all_roles(env: Path, encoder: ChatEncoder) -> None:
    found, _ = played(env, encoder, "plain", "e4", "e5", "Nf3", max_turns=2)
    assert len(found.episode.turns) == 2 and found.episode.cut == "turns"
