"""Environments of other libraries go on from the state that they exported, in another process as in this one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import ConfigError
from headrace.core.protocols import EnvironmentKind, Limits
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.function import _resumes
from headrace.episodes.environments.libraries.attempts import open_reasoning_gym
from headrace.episodes.environments.libraries.games import open_textarena
from headrace.episodes.environments.libraries.gym import open_gym
from headrace.episodes.environments.workers.environment_pool import FunctionSettings, check_function
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.environments.workers.step_driver import exports, is_end
from headrace.episodes.environments.workers.talk import AgentReply
from headrace.episodes.rollout import ForksConfig, fork_problem
from headrace.episodes.tasks.reasoning_gym import columns_of
from support.tool_chats import WrittenAgent

GYM = '''
import os, random

class Dice:
    """Says what it rolls, by the row's seed and the replies."""

    def __init__(self, env_config, extras):
        self.chance, self.left = random.Random(extras["seed"]), 4

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.left -= 1
        rolled = f"{action} and {self.chance.random()}"
        said = [{"role": "user", "content": rolled}]
        return {"observations": said, "reward": len(action) / 10, "done": not self.left}

class Loaded(Dice):
    """Rolls otherwise each time, and exports what it has rolled."""

    def __init__(self, env_config, extras):
        super().__init__(env_config, extras)
        self.chance = random.Random(os.urandom(8))

    def export_state(self):
        return {"chance": self.chance.getstate(), "left": self.left}

    def restore(self, state):
        version, numbers, gauss = state["chance"]
        self.chance.setstate((version, tuple(numbers), gauss))
        self.left = state["left"]

class Fickle(Dice):
    def step(self, action):
        self.chance = random.Random(os.urandom(8))
        return super().step(action)
'''


@pytest.fixture(scope="module")
def dice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gym") / "dice.py"
    path.write_text(GYM)
    return path


def settings(name: str = "", max_turns: int = 8, **options: Any) -> LibrarySettings:
    return LibrarySettings(name, options, max_turns)


class Rewarded(WrittenAgent):
    """Its roles share what they were rewarded with."""

    def role(self, name: str) -> WrittenAgent:
        other = Rewarded()
        other.reward = lambda given, value: self.reward(f"{name}.{given}", value)  # type: ignore[method-assign]
        return other


Steps = list[Any]
"""What each step returned."""


def played(one: Any, agent: WrittenAgent, replies: Sequence[str], reply: AgentReply | None = None) -> Steps:
    """Steps with `reply`, and then with the others, until the rollout is over."""
    steps = [one.step(agent, reply)]
    for text in replies:
        if is_end(steps[-1]):
            break
        steps.append(one.step(agent, said(text)))
    return steps


def said(text: str) -> AgentReply:
    return AgentReply(text, (), "stop", 1)


def kept(one: Any) -> Any:
    """The state as another process reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(one.export_state()))


def check_goes_on_anywhere(made: Callable[..., Any], columns: dict[str, Any], replies: Sequence[str]) -> Steps:
    """Stops before each reply, and goes on with an instance that knows the state alone: it says and rewards the same. Returns the steps."""
    agent = Rewarded()
    whole = played(made(**columns), agent, replies)
    assert is_end(whole[-1]), "write replies down until it is over"
    turns = len(whole) - 1
    for stop in range(1, turns + 1):
        first, before = made(**columns), Rewarded()
        played(first, before, replies[: stop - 1])
        state = kept(first)
        other = made(**columns)
        other.restore(state)
        assert kept(other) == state
        random.random()  # whatever else the process draws
        after = played(other, before, replies[stop:], said(replies[stop - 1]))
        assert after == whole[stop:], f"after {stop} replies"
        assert before.rewards == agent.rewards
    return whole


GAMES = {
    "GuessTheNumber-v0": [f"[{n}]" for n in (20, 1, 19, 2, 18, 3, 17, 4, 16, 5)],
    "TicTacToe-v0": ["[4]", "hm", "[0]", "[2]", "[1]", "[6]"],
    "Bandit-v0": ["[red]", "[blue]", "[green]", "[yellow]", "[purple]"] * 5,
    "Blackjack-v0": ["[hit]", "[stand]"] * 20,
    "FrozenLake-v0": ["[right]", "[down]", "[right]", "[up]"] * 40,
    "2048-v0": ["[left]", "[up]", "[right]", "hm", "no", "no"],
    "PigDice-v0-short": ["[roll]", "[roll]", "[hold]"] * 40,
    "KuhnPoker-v0": ["[check]", "[bet]", "[call]"] * 20,
}


@pytest.mark.parametrize("name", list(GAMES))
def test_games_of_textarena(name: str) -> None:
    made = open_textarena(settings(name, unfinished=0.0))
    whole = check_goes_on_anywhere(made, {"seed": 12, "prompt": "p"}, GAMES[name])
    assert len(whole) > 2, "it is over before it could go on"


def test_a_game_of_another_seed_goes_another_way() -> None:
    made = open_textarena(settings("Blackjack-v0", unfinished=0.0))
    one = made(seed=12)
    played(one, Rewarded(), ["[hit]"])
    with pytest.raises(ValueError, match="the environment says something else than before"):
        made(seed=13).restore(kept(one))


def test_attempts_of_reasoning_gym() -> None:
    entry = {"question": "4 + 3 =", "answer": "7", "metadata": {"source_dataset": "chain_sum", "source_index": 0}}
    made = open_reasoning_gym(settings(discount=0.5))
    whole = check_goes_on_anywhere(made, {"prompt": "4 + 3 =", **columns_of(entry)}, ["8", "9", "7"])
    assert whole[-1] == {"reasoning_gym": 0.25}


@pytest.mark.parametrize("name", ["Dice", "Loaded"])
def test_environments_with_the_methods_of_skyrl_gyms(dice: Path, name: str) -> None:
    made, columns = open_gym(settings(f"{dice}:{name}")), {"prompt": "roll", "seed": 3}
    if name == "Dice":
        check_goes_on_anywhere(made, columns, ["a", "bb", "ccc", "dddd"])
        return
    one = made(**columns)
    played(one, Rewarded(), ["a", "bb"])
    other = made(**columns)
    other.restore(kept(one))
    assert played(other, Rewarded(), ["c", "d"], said("x")) == played(one, Rewarded(), ["c", "d"], said("x"))


def test_an_environment_that_does_not_follow_from_its_replies_is_found_out(dice: Path) -> None:
    made = open_gym(settings(f"{dice}:Fickle"))
    one = made(prompt="roll", seed=3)
    played(one, Rewarded(), ["a"])
    with pytest.raises(ValueError, match='set environment.resumes = "restarted"'):
        made(prompt="roll", seed=3).restore(kept(one))


def test_a_real_environment_of_skyrl_gym() -> None:
    pytest.importorskip("skyrl_gym")
    row = {"prompt": "how many?", "seed": 1, "reward_spec": {"ground_truth": "72"}, "extra_info": {}}
    made = open_gym(settings("gsm8k_multi_turn", 3))
    check_goes_on_anywhere(made, row, ["70 or so", "#### 71", "#### 72"])


# --- which of them export ----------------------------------------------------------------------------------------------------


def resumes(kind: str, spec: str, library: LibrarySettings, given: str = "auto") -> str:
    """The way in which a run resumes, from the settings and what the process says of the class."""
    asked = FunctionSettings(
        spec=spec, what=kind, library=library, seconds=0, tool_seconds=0, tool_characters=9, memory=0
    )
    config = EnvironmentConfig(kind=kind, name=library.name, resumes=given)  # type: ignore[arg-type]
    return _resumes(config, check_function(asked))


@pytest.mark.slow
def test_the_settings_say_whether_replies_are_enough(dice: Path) -> None:
    """A game and attempts are known to follow from them; of an environment of gym only its author knows."""
    where = "headrace.episodes.environments.libraries"
    game = f"{where}.games:open_textarena", settings("TicTacToe-v0")
    assert resumes("textarena", *game) == "exported" and resumes("textarena", *game, "replayed") == "replayed"
    plain = f"{where}.gym:open_gym", settings(f"{dice}:Dice")
    assert (resumes("gym", *plain), resumes("gym", *plain, "exported")) == ("replayed", "exported")
    assert resumes("gym", f"{where}.gym:open_gym", settings(f"{dice}:Loaded")) == "exported"
    with pytest.raises(ConfigError, match='environment.resumes = "stateless" needs a class with step'):
        resumes("textarena", *game, "stateless")
    assert all(exports(one) for one in (open_textarena(game[1]), open_gym(plain[1]), open_reasoning_gym(settings())))


def test_forks_name_the_setting() -> None:
    config = EnvironmentConfig(kind="gym", name="gsm8k")
    kind = EnvironmentKind(lambda prompt, seed: None, Limits(8), "replayed")  # type: ignore[arg-type,return-value]
    told = fork_problem(ForksConfig(alternatives=2), kind, config.setting, config.export_remedy)
    assert 'set environment.resumes = "exported" if it follows from its row, its seed and the replies' in told
    assert os.linesep not in told
