"""Agents of frameworks, unmodified, through the gateway: their tools are really called, and what is trained are the tokens that were sampled.

Their packages are those of `test_clients.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from calling_model import ANSWER, CONTEXT, save_calling_model
from test_clients import HERE, PYTHON, node_program, with_node, with_python

import headrace
from headrace.core.types import Prompt
from headrace.durable.journal import read_steps
from headrace.episodes.environments.agents.agent_environment import open_agents
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Played
from headrace.facts.facts import GroupEnded, IdentityChecked
from support.gateway.written_turns import Model, check_rows, encoder_of
from support.tiny_run import of, tiny_config
from support.tool_chats import HERMES

SAID = ('I add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "3", "Yes, I am.")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=with_python) for name in ("langchain", "openai_agents", "litellm")]
)
def test_an_agent_plays_a_rollout(name: str, tmp_path: Path) -> None:
    """Each request continues the one before: its history comes back as it was sampled."""
    encoder = encoder_of(tmp_path / "model", HERMES)
    model = Model(encoder, [f"{said}<|im_end|>" for said in SAID])
    command = (str(PYTHON), str(HERE / f"agent_{name}.py"))
    config = EnvironmentConfig(kind="process", command=command, max_turns=8, seconds=900.0)

    async def main() -> list[object]:
        kind = open_agents(OpenedWith(config=config, encoder=encoder, log=tmp_path / "log"))
        prompt = Prompt("p", "1 and 2?", (1,))
        try:
            return list(await roll_out(kind, prompt, [0], ask=model, decode=encoder.decode))
        finally:
            await kind.close()

    (found,) = asyncio.run(main())
    assert isinstance(found, Played), (found, (tmp_path / "log").read_text())
    assert found.rewards == {"called": 1.0, "answered": 1.0}
    assert [turn.parents for turn in found.episode.turns] == [(), (0,), (1,)]
    assert found.episode.turns[1].messages[0]["content"] == "3"
    check_rows(found, model)


@pytest.mark.parametrize("name", [pytest.param("ai_sdk", marks=with_node)])
def test_an_agent_is_trained(name: str, tmp_path: Path) -> None:
    model = save_calling_model(tmp_path / "model")
    command = node_program(f"agent_{name}.mjs", tmp_path)
    tables = {
        "reward": {"function": ""},
        "environment": {"kind": "process", "command": command, "seconds": 900.0, "processes": 2},
        "engine": {"context_length": CONTEXT, "kv_gib": 0.05},
        "rollout": {"group_size": 3, "max_tokens": 90},
        "staleness": {"groups_per_step": 2},
        "train": {"steps": 3, "learning_rate": 1e-4},
        "watch": {"identity_every": 1},
    }
    assert headrace.train(tiny_config(tmp_path, model, **tables)).reason == "finished"
    directory = tmp_path / "runs" / "tiny"
    steps = list(read_steps(directory))
    pairs = [pair for step in steps for group in step.groups for pair in zip(group.rows, group.scored, strict=True)]
    assert len(steps) == 3 and not any(fact.failures for fact in of(directory, GroupEnded))
    assert all(fact.ok for fact in of(directory, IdentityChecked))
    called = [(row, one) for row, one in pairs if one.rewards["called"]]
    assert len(called) > len(pairs) / 3, "it has learned to"
    for row, one in called:
        first, second, *_ = turns = one.episode.turns
        assert [turn.parents for turn in turns] == [(), *((place,) for place in range(len(turns) - 1))]
        assert second.messages[0]["role"] == "tool" and second.messages[0]["content"] == "5"
        assert row.prompt == first.context
        assert row.tokens[: len(first.completion.tokens)] == first.completion.tokens
        assert row.mask.count(True) == sum(len(turn.completion.tokens) for turn in turns), "each sampled token once"
    texts = {turn.reply["content"] for _, one in called for turn in one.episode.turns[1:2]}
    assert ANSWER in texts
