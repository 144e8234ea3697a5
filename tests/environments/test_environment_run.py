"""A whole run whose rollouts a function of the user plays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.core.errors import ConfigError
from headrace.durable.journal import read_steps
from headrace.facts.facts import Evaluated, GroupEnded
from headrace.run.config import load_config
from headrace.run.rehearse import rehearse
from support.runs.beside import until
from support.runs.processes import alive
from support.tiny_run import HOLD, Config, hold, kill_when, of, release, tiny_config

ENV = (
    HOLD
    + '''
import asyncio, os

LOG = HERE / 'log'

async def in_the_middle():
    while is_held():
        (HERE / 'middle').touch()
        await asyncio.sleep(0.02)

async def play(agent, prompt, answer, **columns):
    reply = await agent.chat(prompt)
    agent.reward("length", len(reply.text) / 100)
    reply = await agent.chat("more?")
    return {"e": reply.text.count("e") / max(len(reply.text), 1)}

async def slow(agent, prompt, answer):
    with LOG.open("a") as log:
        log.write(f"{os.getpid()} {agent.seed}\\n")
    reply = await agent.chat(prompt)
    await in_the_middle()
    reply = await agent.chat(f"{len(reply.text)}?")
    return reply.text.count("e") / max(len(reply.text), 1)

class Exported:
    """Looks a word up between two turns. The log has a line for each look; what it finds differs every time."""

    def __init__(self, prompt, answer, seed):
        self.prompt, self.seed, self.looks = prompt, seed, []

    async def step(self, agent, reply):
        if reply is None:
            return self.prompt
        if len(self.looks) == 2:
            return sum(self.looks) / 1e12
        if self.looks:
            await in_the_middle()
        with LOG.open("a") as log:
            log.write(f"{os.getpid()} {self.seed} {len(self.looks)}\\n")
        self.looks.append(int.from_bytes(os.urandom(4), "big"))
        agent.reward("look", len(self.looks))
        return f"{self.looks[-1]}?"

    def export_state(self):
        return {"looks": self.looks}

    def restore(self, state):
        self.looks = state["looks"]

async def fails(agent, prompt, answer):
    raise RuntimeError(f"no game has the answer {answer}")

async def calls(agent, prompt, answer):
    def look(word: str) -> str:
        """Looks a word up.

        Args:
            word: the word
        """
        return word

    return float((await agent.chat(prompt, tools=[look])).text == answer)
'''
)


def config_of(directory: Path, model: Path, function: str = "play", **tables: Any) -> dict[str, Any]:
    (directory / "env.py").write_text(ENV)
    return tiny_config(
        directory,
        model,
        reward={"function": ""},
        environment={"function": f"{directory / 'env.py'}:{function}", "workers": 1},
        engine={"context_length": 128},
        **tables,
    )


@pytest.mark.whole
def test_a_function_plays_the_rollouts_of_a_run(tiny_llama: Path, tmp_path: Path) -> None:
    result = headrace.train(config_of(tmp_path, tiny_llama, train={"steps": 2}, eval={"prompts": 2, "samples": 1}))
    assert result.reason == "finished"
    directory = tmp_path / "runs" / "tiny"
    steps = list(read_steps(directory))
    assert len(steps) == 2
    for group in (group for step in steps for group in step.groups):
        for row, rollout in zip(group.rows, group.scored, strict=True):
            first, second = rollout.episode.turns
            assert row.prompt == group.prompt.tokens == first.context, "the template, as the task applies it"
            said, more = first.completion, second.completion
            assert row.tokens == said.tokens + second.context + more.tokens
            assert row.mask == (True,) * len(said.tokens) + (False,) * len(second.context) + (True,) * len(more.tokens)
            sampled = [p for p, kept in zip(row.logprobs, row.mask, strict=True) if kept]
            assert sampled == [*said.logprobs, *more.logprobs]
            assert rollout.rewards.keys() == {"e", "length"} and rollout.reward == pytest.approx(
                sum(rollout.rewards.values())
            )
            assert rollout.turn_rewards == ({"length": rollout.rewards["length"]}, {})
            assert [turn.messages[0]["role"] for turn in rollout.episode.turns] == ["user"] * 2
            assert first.reply == {"role": "assistant", "content": said.text}
    assert all(not fact.failures for fact in of(directory, GroupEnded))
    assert all(not fact.failures and fact.prompts == 2 for fact in of(directory, Evaluated))


def test_an_evaluation_is_played_too(tiny_llama: Path, tmp_path: Path) -> None:
    measured = headrace.evaluate(config_of(tmp_path, tiny_llama, eval={"prompts": 3, "samples": 2}))
    assert measured.prompts == 3 and not measured.failures and 0 <= measured.reward_mean <= 1.2


def killed_in_the_middle(config: Config) -> None:
    """Its first step is trained, and an episode waits between its turns."""
    directory = Path(config["out"]).parent
    hold(directory, 1)
    kill_when(config, (directory / "middle").exists)
    release(directory, 1)


@pytest.mark.whole
def test_a_run_killed_in_the_middle_of_episodes_goes_on_there(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_llama, "slow", train={"steps": 4})
    directory, log = tmp_path / "runs" / "tiny", tmp_path / "log"
    killed_in_the_middle(config)
    first = [line.split() for line in log.read_text().splitlines()]
    until(lambda: not any(alive(int(pid)) for pid, _ in first))  # its processes end with it
    assert headrace.train(resume=directory).reason == "finished"
    again = [line.split()[1] for line in log.read_text().splitlines()[len(first) :]]
    assert {seed for _, seed in first} & set(again), "an episode was under way"
    steps = list(read_steps(directory))
    assert len(steps) == 4 and not any(fact.lost_tokens or fact.failures for fact in of(directory, GroupEnded))
    for rollout in (rollout for step in steps for group in step.groups for rollout in group.scored):
        said, more = rollout.episode.turns
        assert more.messages[0]["content"] == f"{len(said.completion.text)}?" and more.parents == (0,)


@pytest.mark.slow
def test_a_class_that_exports_its_state_goes_on_in_its_turn(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_llama, "Exported", train={"steps": 4})
    directory, log = tmp_path / "runs" / "tiny", tmp_path / "log"
    killed_in_the_middle(config)
    until(lambda: not any(alive(int(line.split()[0])) for line in log.read_text().splitlines()))
    before = [tuple(line.split()[1:]) for line in log.read_text().splitlines()]
    assert headrace.train(resume=directory).reason == "finished"
    lines = [tuple(line.split()[1:]) for line in log.read_text().splitlines()]
    looked = {seed for seed, _ in before}
    went_on = {seed for seed, look in lines[len(before) :] if look == "1"} & looked
    assert went_on, "an episode was between its looks"
    twice = {line for line in lines if lines.count(line) > 1 and line[0] != "0"}  # 0: the rehearsal's
    over = {(seed, str(int(look) - 1)) for seed, look in before}
    assert not twice & over, "a step was taken again, though a later one had begun"
    steps = list(read_steps(directory))
    assert len(steps) == 4 and not any(fact.lost_tokens or fact.failures for fact in of(directory, GroupEnded))
    for rollout in (rollout for step in steps for group in step.groups for rollout in group.scored):
        assert [turn.parents for turn in rollout.episode.turns] == [(), (0,), (1,)]
        looks = [int(turn.messages[0]["content"].rstrip("?")) for turn in rollout.episode.turns[1:]]
        assert rollout.rewards["Exported"] == sum(looks) / 1e12, "the state has what the model was shown"
        assert rollout.turn_rewards == ({"look": 1.0}, {"look": 2.0}, {})


def test_the_rehearsal_plays_an_episode(tiny_llama: Path, tmp_path: Path) -> None:
    found = asyncio.run(rehearse(load_config(config_of(tmp_path, tiny_llama))))
    lines = dict(found.sections["Environment"])
    assert lines["returned"].startswith("e = 0; to turns: length = 0.0") and "after 2 turn(s)" in found.page()
    assert lines["the first turn"].startswith("<user>") and "the environment's own" in found.page()


@pytest.mark.parametrize(
    ("function", "words"),
    [("fails", "no game has the answer"), ("calls", "environment.tools"), ("lacks", "defines no lacks")],
)
def test_what_fails_in_every_rollout_is_refused_at_the_start(
    tiny_llama: Path, tmp_path: Path, function: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(rehearse(load_config(config_of(tmp_path, tiny_llama, function))))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"task": {"chat": False}}, "task.chat = false"),
        ({"task": {"examples": 2}}, "task.examples = 2"),
        ({"environment": {"kind": "single_turn", "max_turns": 3}}, "environment.max_turns belongs to"),
        ({"environment": {"function": "env:play"}}, "is not of the form path/to/file.py:name"),
    ],
)
def test_pairs_that_cannot_work_are_refused(tables: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, tmp_path)
    merged = {**config, **{name: {**config.get(name, {}), **table} for name, table in tables.items()}}
    if words.startswith("environment.max_turns"):
        merged["environment"] = tables["environment"]
    with pytest.raises(ConfigError) as error:
        load_config(merged)
    assert words in str(error.value)
