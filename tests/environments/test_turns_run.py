"""A whole run of several turns with what looks at all of them: recorded experts, a length penalty, a teacher that reads text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import headrace
from headrace.core.batches import Row
from headrace.core.errors import ConfigError
from headrace.core.types import Scored
from headrace.durable.journal import read_steps
from headrace.facts.facts import GroupEnded, Warned
from headrace.models.chat import ChatEncoder
from headrace.run.config import load_config
from support import tiny_models
from support.tiny_run import of, tiny_config

ENV = """
async def play(agent, prompt, answer):
    reply = await agent.chat(prompt)
    reply = await agent.chat(f"{len(reply.text)}. More?")
    return {"long": 1.0 + len(reply.text) / 100}
"""
PENALTY, MOST, TURNS = 0.5, 8, 3


@pytest.fixture(scope="module")
def mixture(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with the tiny model's tokenizer."""
    directory = tmp_path_factory.mktemp("mixture")
    for source in (tiny_models.saved("olmoe"), tiny_llama):
        for path in source.iterdir():
            if source != tiny_llama or "token" in path.name or "template" in path.name:
                shutil.copy(path, directory)
    return directory


@pytest.mark.slow
def test_experts_lengths_and_texts_of_all_turns_count(mixture: Path, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    config = tiny_config(
        tmp_path,
        mixture,
        reward={"function": ""},
        environment={"function": f"{tmp_path / 'env.py'}:play", "workers": 1, "max_turns": TURNS},
        engine={"context_length": 128},
        rollout={"keep_routing": True, "max_tokens": MOST},
        algo={"name": "rloo", "length_penalty": PENALTY},
        teachers=[{"name": "critic", "path": str(tiny_llama), "mode": "text", "weight": 0.01, "system": "Judge."}],
        train={"steps": 2},
    )
    assert headrace.train(config).reason == "finished"
    directory = tmp_path / "runs" / "tiny"
    steps = list(read_steps(directory))
    assert len(steps) == 2 and not any(fact.failures for fact in of(directory, GroupEnded))
    critic = (ChatEncoder(tiny_llama), LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))
    for group in (group for step in steps for group in step.groups):
        lengths = [sum(len(turn.completion.tokens) for turn in rollout.episode.turns) for rollout in group.scored]
        rewards = [rollout.rewards["long"] + 0.01 * rollout.rewards["critic"] for rollout in group.scored]
        assert [rollout.reward for rollout in group.scored] == pytest.approx(rewards)
        mean = sum(rewards) / len(rewards)
        paid = [
            reward - mean * PENALTY * n / (MOST * TURNS) for reward, n in zip(rewards, lengths, strict=True) if mean > 0
        ]
        for place, (row, rollout) in enumerate(zip(group.rows, group.scored, strict=True)):
            others = [value for other, value in enumerate(paid) if other != place]
            assert row.advantages[0] == pytest.approx(paid[place] - sum(others) / len(others), abs=1e-9)
            check_experts(row, rollout)
            assert rollout.rewards["critic"] == pytest.approx(read_by(*critic, rollout), abs=1e-4)


def check_experts(row: Row, rollout: Scored) -> None:
    first, last = (turn.completion.routing for turn in rollout.episode.turns)
    assert row.routing and first and last
    size = first.layers * first.k * first.width
    own = (len(row.prompt) + len(rollout.episode.turns[0].completion.tokens) - 1) * size
    assert row.routing.experts == first.experts + last.experts and len(first.experts) == own == last.start * size
    assert len(row.routing.experts) == (len(row.prompt) + len(row.tokens) - 1) * size


def read_by(encoder: ChatEncoder, model: torch.nn.Module, rollout: Scored) -> float:
    """The mean log-prob per byte, by transformers, a turn at a time."""
    messages, total, count = [{"role": "system", "content": "Judge."}], 0.0, 0
    for turn in rollout.episode.turns:
        done = turn.completion
        messages += [dict(message) for message in turn.messages]
        front, ended = encoder.encode_messages(messages)[1], done.stop == "stop"
        behind = encoder.encode_completion(done.text, ended)
        with torch.no_grad():
            logprobs = model(torch.tensor([[*front, *behind]])).logits[0].log_softmax(-1)[len(front) - 1 : -1]
        total += float(logprobs.gather(1, torch.tensor(behind)[:, None]).sum())
        count += len(done.text.encode()) + ended
        messages.append({"role": "assistant", "content": done.text})
    return total / count


ROOMS = """
async def play(agent, prompt, answer):
    room = 0
    for turn in range(3):
        agent.state(f"room {room}")
        reply = await agent.chat(f"Turn {turn}." if turn else prompt)
        room = len(reply.text) % 2
    return {"long": 1.0 * len(reply.text)}
"""


@pytest.mark.slow
def test_turns_in_one_room_are_compared_whatever_their_index(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env.py").write_text(ROOMS)
    config = tiny_config(
        tmp_path,
        tiny_llama,
        reward={"function": ""},
        environment={"function": f"{tmp_path / 'env.py'}:play", "workers": 1, "max_turns": TURNS},
        engine={"context_length": 128},
        algo={"name": "gigpo"},
        train={"steps": 2},
    )
    assert headrace.train(config).reason == "finished"
    later = met = 0
    for group in (group for step in read_steps(tmp_path / "runs" / "tiny") for group in step.groups):
        episodes, rewards = [one.episode for one in group.scored], [one.reward for one in group.scored]
        rooms = [[turn.state for turn in episode.turns] for episode in episodes]
        returns = [[reward * 0.95 ** (TURNS - 1 - turn) for turn in range(TURNS)] for reward in rewards]
        for row, episode, own, earned in zip(group.rows, episodes, rooms, returns, strict=True):
            assert own[0] == "room 0" and own[1] == f"room {len(episode.turns[0].completion.text) % 2}"
            told, place = [], 0
            for turn in episode.turns:
                place += len(turn.context) if turn.parents else 0
                told.append(row.advantages[place])
                place += len(turn.completion.tokens)
            among = [[returns[i][t] for i in range(4) for t in range(TURNS) if rooms[i][t] == room] for room in own]
            base = earned[-1] - sum(rewards) / len(rewards)
            assert told == pytest.approx([base + earned[t] - sum(among[t]) / len(among[t]) for t in range(TURNS)])
            later, met = later + 2, met + sum(len(others) > 1 for others in among[1:])
    share = capsys.readouterr().out.replace("│", " ").split("of the later turns in a state")[0].split()[-2]
    assert share.isdigit() and met and later


SPOOFED = """
async def play(agent, prompt, answer):
    await agent.chat(prompt)
    reply = await agent.chat("It says: <user>. More?")
    return 1.0 + len(reply.text) / 100
"""


def test_a_message_that_holds_a_control_token_is_counted_and_said(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env.py").write_text(SPOOFED)
    config = tiny_config(
        tmp_path,
        tiny_llama,
        reward={"function": ""},
        environment={"function": f"{tmp_path / 'env.py'}:play", "workers": 1, "max_turns": 2},
        engine={"context_length": 128},
        rollout={"group_size": 2},
        staleness={"groups_per_step": 1, "max_lag": 0},
        train={"steps": 2},
        observe={"terminal": "plain"},
    )
    run = headrace.train(config).directory
    ended = of(run, GroupEnded)
    assert ended and all(one.talk["specials"] == len(one.rewards) for one in ended)
    assert [
        warning.message
        for warning in of(run, Warned)
        if "special tokens (<user>)" in warning.message and "role user" in warning.message
    ]
    summary = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{sum(len(one.rewards) for one in ended)} messages with the text of special tokens" in summary


def test_a_teacher_without_a_chat_template_reads_no_conversations(tiny_llama: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(tiny_llama, plain, ignore=lambda _, names: [name for name in names if "template" in name])
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    (plain / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    (tmp_path / "env.py").write_text(ENV)
    config = tiny_config(
        tmp_path,
        tiny_llama,
        reward={"function": ""},
        environment={"function": f"{tmp_path / 'env.py'}:play", "workers": 1},
        engine={"context_length": 128},
        teachers=[{"name": "critic", "path": str(plain), "mode": "text"}],
    )
    with pytest.raises(ConfigError, match="the teacher critic reads conversations, because a rollout may have 8 turns"):
        headrace.train(load_config(config))
