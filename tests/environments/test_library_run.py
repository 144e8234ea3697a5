"""A whole run whose rollouts an environment of another library plays, on prompts that are seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import textarena

import headrace
from headrace.core.types import Scored, Turn
from headrace.durable.journal import read_steps
from headrace.episodes.environments.libraries.games import Game
from headrace.facts.facts import Evaluated, GroupEnded
from support.tiny_run import has_step, held_reward, kill_when, of, release, tiny_config

ENV = """
import random

class Letters:
    def __init__(self, env_config, extras):
        self.seed, self.turns = extras["seed"], env_config.turns

    def init(self, prompt):
        self.letter = random.Random(self.seed).choice("aeiou")
        return [{"role": "user", "content": f"{self.letter} {self.seed}"}], {}

    def step(self, action):
        self.turns -= 1
        share = action.count(self.letter) / max(len(action), 1)
        return {"observations": [{"role": "user", "content": "more"}], "reward": share, "done": not self.turns}
"""


@pytest.mark.slow
def test_a_run_trains_on_an_environment_of_a_library(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(ENV)
    config = tiny_config(
        tmp_path,
        tiny_llama,
        reward={"function": ""},
        environment={
            "kind": "gym",
            "name": f"{tmp_path / 'letters.py'}:Letters",
            "options": {"turns": 2},
            "workers": 1,
        },
        engine={"context_length": 128},
        train={"steps": 1},
        eval={"prompts": 2, "samples": 1},
    )
    config["task"] = {"kind": "seeds", "held_out": 4}
    assert headrace.train(config).reason == "finished"
    directory = tmp_path / "runs" / "tiny"
    (step,) = read_steps(directory)
    firsts = [{rollout.episode.turns[0].messages[0]["content"] for rollout in group.scored} for group in step.groups]
    seeds = [group.prompt.columns["seed"] for group in step.groups]
    assert [len(one) for one in firsts] == [1] * 4, "the rollouts of a group begin alike"
    assert [first.split()[1] for (first,) in firsts] == list(map(str, seeds)) and len(set(seeds)) == 4
    for rollout in (rollout for group in step.groups for rollout in group.scored):
        assert len(rollout.episode.turns) == 2 and [turn.keys() for turn in rollout.turn_rewards] == [{"gym"}, {"gym"}]
        assert rollout.rewards["gym"] == sum(turn["gym"] for turn in rollout.turn_rewards) == rollout.reward
        assert rollout.episode.turns[1].parents == (0,)
    assert not any(fact.failures for fact in of(directory, GroupEnded))
    assert all(not fact.failures and fact.prompts == 2 for fact in of(directory, Evaluated))


@pytest.mark.slow
def test_games_branch_and_go_on_after_a_kill(tiny_llama: Path, tmp_path: Path) -> None:
    """Each end of a rollout is one game from its first move on: played again by hand, it says what the model read."""
    longer = tmp_path / "model"
    shutil.copytree(tiny_llama, longer)
    model = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps({**model, "max_position_embeddings": 2048}))
    config = tiny_config(
        tmp_path,
        longer,
        environment={
            "kind": "textarena",
            "name": "GuessTheNumber-v0",
            "options": {"unfinished": 0.0},
            "max_turns": 4,
            "workers": 1,
        },
        engine={"context_length": 1536, "kv_gib": 0.1},
        rollout={"group_size": 3, "max_tokens": 3, "forks": {"alternatives": 2}},
        staleness={"groups_per_step": 2, "max_lag": 1},
        train={"steps": 3},
        reward=held_reward(tmp_path, 1),
    )
    config["task"] = {"kind": "seeds"}
    directory = tmp_path / "runs" / "tiny"
    kill_when(config, lambda: has_step(directory))
    release(tmp_path, 1)
    assert headrace.train(resume=directory).reason == "finished"
    steps = list(read_steps(directory))
    assert len(steps) == 3 and not any(fact.lost_tokens or fact.failures for fact in of(directory, GroupEnded))
    for group in (group for step in steps for group in step.groups):
        for rollout in group.scored:
            assert len(rollout.branches) == 3
            for end in ends_of(rollout):
                check_game(end, group.prompt.columns["seed"])


def ends_of(rollout: Scored) -> list[list[Turn]]:
    shared = rollout.episode.turns[: rollout.branches[0].first]
    return [[*shared, *rollout.episode.turns[branch.first : branch.end]] for branch in rollout.branches]


def check_game(turns: list[Turn], seed: int) -> None:
    game = Game(lambda: textarena.make("GuessTheNumber-v0"), seed, players=1)
    for turn in turns:
        assert turn.messages[-1]["content"] == game.said()[1]
        game.over(turn.completion.text)
