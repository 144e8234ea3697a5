"""A real agent framework drives the gateway, unmodified: pydantic-ai, which knows nothing but OPENAI_BASE_URL and OPENAI_API_KEY."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from headrace.core.types import Prompt
from headrace.episodes.environments.agents.agent_environment import open_agents
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Played
from support import tool_chats
from support.gateway.written_turns import Model, check_rows, encoder_of

AGENT = '''
import asyncio, json, sys
from pydantic_ai import Agent

given = json.load(sys.stdin)

def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

async def main():
    right = 0
    for model in ("openai-chat:policy", "openai-responses:policy"):
        agent = Agent(model, instructions="Use the tool.", tools=[add])
        result = await agent.run(given["prompt"])
        right += result.output == given["columns"]["answer"]
        async with agent.run_stream("Sure?", message_history=result.all_messages()) as stream:
            right += await stream.get_output() == "Yes, I am."
    print(right / 4)

asyncio.run(main())
'''
WRONG = '<tool_call>{"name": "add", "arguments": {"a": "one", "b": 2}}</tool_call><|im_end|>'
RIGHT = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'


@pytest.mark.slow
def test_pydantic_ai_plays_a_rollout(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    encoder = encoder_of(tmp_path / "model", tool_chats.HERMES)
    model = Model(encoder, [WRONG, RIGHT, "3<|im_end|>", "Yes, I am.<|im_end|>"] * 2)
    command = (sys.executable, str(tmp_path / "agent.py"))
    config = EnvironmentConfig(kind="process", command=command, max_turns=8)

    async def main() -> list[object]:
        kind = open_agents(OpenedWith(config=config, encoder=encoder, log=tmp_path / "log"))
        prompt = Prompt("p", "1 and 2?", (1,), columns={"answer": "3"})
        try:
            return list(await roll_out(kind, prompt, [0], ask=model, decode=encoder.decode))
        finally:
            await kind.close()

    (found,) = asyncio.run(main())
    assert isinstance(found, Played), found
    assert found.rewards == {"agent": 1.0}
    turns = found.episode.turns
    assert [turn.parents for turn in turns] == [(), (0,), (1,), (2,), (), (4,), (5,), (6,)], (
        "both clients send back what they got"
    )
    assert "a valid integer" in turns[1].messages[0]["content"], "the framework answers a call that does not fit"
    assert turns[2].messages[0]["content"] == "3" and "Use the tool." in encoder.written(turns[0].context)
    check_rows(found, model)
