"""Games and problems other than the recipes': what headrace plays and rewards is what the library alone plays and rewards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
import textarena
from test_real_libraries import OPENENV, REWARD, roomy, run, served  # noqa: F401  (a fixture)

import headrace
from headrace.durable.journal import read_steps
from headrace.episodes.environments.libraries.games import open_textarena
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.tasks.prompts import seed_from
from headrace.episodes.tasks.reasoning_gym import BLOCK
from support.tool_chats import WrittenAgent, play_steps

MOVES = ("[0]", "[1 2]", "hm", "[up]", "[4]", "[2 3]", "[roll]", "[hold]", "[1 1 1]", "[3]")
GAMES = {
    "Mastermind-v0": 1,
    "FrozenLake-v0": 1,
    "TowerOfHanoi-v0": 1,
    "ConnectFour-v0": 2,
    "Nim-v0": 2,
    "PigDice-v0": 2,
}
"""With the numbers of their players. PigDice rolls dice while it is played."""
SEEDS = (3, 4, 5, 6)


def alone(name: str, players: int, seed: int, moves: dict[int, list[str]]) -> tuple[bool, dict[int, Any]]:
    """Plays moves without headrace, in a process whose random numbers follow from the seed. Returns whether the game was over, and its
    results by player."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    game, over = textarena.make(name), False
    game.reset(num_players=players, seed=seed)
    left = {player: list(own) for player, own in moves.items()}
    while not over:
        player, _ = game.get_observation()
        if not left.get(player):
            return False, {}
        over, _ = game.step(left[player].pop(0))
    rewards, _ = game.close()
    return True, rewards


@pytest.mark.parametrize("name", GAMES)
def test_a_game_has_the_result_that_it_has_without_headrace(name: str) -> None:
    players, ended = GAMES[name], 0
    play = open_textarena(LibrarySettings(name, {"unfinished": 77.0}, 40))
    for seed in SEEDS:
        rng = random.Random(seed)
        moves = {player: [rng.choice(MOVES) for _ in range(12)] for player in range(players)}
        over, results = alone(name, players, seed, moves)
        if players == 1:
            agent = WrittenAgent(*moves[0], limit=12)
            found = {0: play_steps(play, agent, prompt="p", seed=seed)["textarena"]}
        else:
            roles = [WrittenAgent(*moves[player], limit=12) for player in range(players)]
            play_steps(play, WrittenAgent(player_0=roles[0], player_1=roles[1]), prompt="p", seed=seed)
            found = {place: role.rewards[-1][1] for place, role in enumerate(roles) if role.rewards}
        expected = {player: results[player] for player in found} if over else dict.fromkeys(found, 77.0)
        assert found == expected, (name, seed)
        ended += over
    assert ended, "one of the games at least has a result"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FrozenLake-v0", "PigDice-v0"])
def test_a_run_of_another_game_has_its_results(name: str, roomy: Path, tmp_path: Path) -> None:  # noqa: F811
    environment = {"kind": "textarena", "name": name, "max_turns": 12, "options": {"unfinished": 0.0}}
    assert run("game", roomy, tmp_path, environment=environment)
    groups = [group for step in read_steps(tmp_path / "game") for group in step.groups]
    for prompt, one in ((group.prompt, rollout) for group in groups for rollout in group.scored):
        turns = one.episode.turns
        numbers = [int(turn.agent.rpartition(" ")[2]) if turn.agent else 0 for turn in turns]
        moves: dict[int, list[str]] = {}
        for number, turn in zip(numbers, turns, strict=True):
            moves.setdefault(number, []).append(turn.reply["content"])
        over, results = alone(name, GAMES[name], prompt.columns["seed"], moves)
        earned = {name: value for name, value in one.rewards.items() if name.endswith("textarena")}
        assert len(earned) == len(moves)
        for reward, value in earned.items():
            player = int(reward.split(".")[0].rpartition(" ")[2]) if "." in reward else 0
            assert value == (results[player] if over else 0.0), (one.rewards, results)


COUNTING = """
import asyncio, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Said(Action):
    message: str

class Told(Observation):
    text: str

class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **columns):
        self.seed, self.steps = seed, 0
        return Told(text=f"{seed}?", done=False, reward=None)

    def step(self, action, timeout_s=None, **rest):
        self.steps += 1
        return Told(text=f"{self.seed}: {self.steps}", done=self.steps == 1 + self.seed % 3, reward=self.steps + self.seed % 89 / 100)

    @property
    def state(self):
        return self._state

uvicorn.run(create_app(Counting, Said, Told, max_concurrent_envs=64), host="127.0.0.1", port=8000, log_level="warning")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path(OPENENV).exists(), reason=f"no openenv in {OPENENV}: make openenv-setup")
def test_sessions_of_an_openenv_server_are_those_of_their_rollouts(roomy: Path, tmp_path: Path) -> None:  # noqa: F811
    """Each with the seed of its group, and steps of its own, which are rewarded in their turns."""
    with served(tmp_path, COUNTING) as url:
        assert run("openenv", roomy, tmp_path, f'environment.name="{url}"')
    seen = 0
    for group in (group for step in read_steps(tmp_path / "openenv") for group in step.groups):
        seed = int(group.prompt.columns["seed"])
        for rollout in group.scored:
            earned = [next(iter(turn.values()), None) for turn in rollout.turn_rewards]
            assert earned == pytest.approx([place + seed % 89 / 100 for place in range(1, 2 + seed % 3)])
            told = [turn.messages[-1]["content"] for turn in rollout.episode.turns if turn.messages]
            assert (
                told[-len(earned) + 1 :] == [f"{seed}: {place}" for place in range(1, len(earned))] or len(earned) == 1
            )
            seen += len(earned) > 1
    assert seen


def varied(place: Path) -> str:
    """A reward that no two rollouts share."""
    (place / "reward.py").write_text(REWARD)
    return f"{place / 'reward.py'}:varied"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["spell_backward", "letter_counting"])
def test_a_run_of_another_family_has_its_scores(family: str, roomy: Path, tmp_path: Path) -> None:  # noqa: F811
    problems = reasoning_gym.create_dataset(family, size=BLOCK, seed=seed_from("train", 0, 0))
    result = headrace.train(
        {
            "name": "family",
            "out": str(tmp_path),
            "model": {"path": str(roomy)},
            "task": {"kind": "reasoning_gym", "name": family, "held_out": 4},
            "reward": {"functions": [{"function": "reasoning_gym"}, {"function": varied(tmp_path)}]},
            "rollout": {"group_size": 3, "max_tokens": 8},
            "train": {"steps": 2, "dtype": "float32"},
            "engine": {"dtype": "float32", "kv_gib": 0.05, "context_length": 2048},
            "staleness": {"groups_per_step": 2},
            "eval": {"prompts": 0},
            "observe": {"terminal": "off"},
        }
    )
    groups = [group for step in read_steps(result.directory) for group in step.groups]
    assert len(groups) == 4
    for group in groups:
        problem = problems[int(group.prompt.id.partition("/")[2])]
        assert group.prompt.text == problem["question"]
        for rollout in group.scored:
            assert rollout.rewards["reasoning_gym"] == pytest.approx(
                problems.score_answer(answer=rollout.episode.last.text.strip(), entry=problem)
            )
