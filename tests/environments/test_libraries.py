"""Environments of other libraries play rollouts: the interface of each, with environments that are written here."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import textarena

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.kinds import ENVIRONMENTS, LIBRARIES
from headrace.episodes.environments.libraries.attempts import open_reasoning_gym
from headrace.episodes.environments.libraries.games import Game, open_textarena
from headrace.episodes.environments.libraries.gym import open_gym
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.episodes import Played
from headrace.episodes.tasks.reasoning_gym import columns_of
from headrace.models.chat import ChatEncoder
from headrace.run.config import load_config
from support import tool_chats
from support.tool_chats import WrittenAgent, play_said, play_steps


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(tool_chats.save_tokenizer(tmp_path_factory.mktemp("tokens"), tool_chats.HERMES))


def settings(name: str = "", max_turns: int = 8, **options: Any) -> LibrarySettings:
    return LibrarySettings(name, options, max_turns)


# --- environments with the methods of skyrl-gym's ---------------------------------------------------------------------------

GYM = '''
import os
from pathlib import Path

class Counter:
    """Counts up to the row's number: each right number earns 0.5, a wrong one ends the episode."""

    def __init__(self, env_config, extras):
        self.target, self.at, self.step_size = extras["target"], 0, env_config.get("step", 1)
        self.how, self.mark = extras.get("how", ""), extras.get("mark", "")

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": f"count to {self.target}"}], {}

    def step(self, action):
        if self.how == "raises":
            raise RuntimeError("the counter is broken")
        if self.how == "dies":
            os._exit(7)
        if self.how in RESULTS:
            return RESULTS[self.how]
        self.at += self.step_size
        right = action.strip() == str(self.at)
        said = [{"role": "user", "content": f"{self.at} it is"}]
        return {"observations": said, "reward": 0.5 * right, "done": not right or self.at >= self.target, "metadata": {}}

    def close(self):
        if self.mark:
            Path(self.mark).write_text("closed")

RESULTS = {
    "none": None,
    "silent": {"observations": [], "reward": 0.0, "done": False},
    "no number": {"observations": [], "reward": "much", "done": True},
    "nan": {"observations": [], "reward": float("nan"), "done": True},
}

class OneMethod:
    def init(self, prompt):
        return prompt, {}
'''


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gym") / "counter.py"
    path.write_text(textwrap.dedent(GYM))
    return path


def test_each_step_is_a_turn_with_the_reward_that_it_caused(counter: Path) -> None:
    agent = WrittenAgent("1", "2", "5")
    assert play_steps(open_gym(settings(f"{counter}:Counter")), agent, prompt="please", target=3) == {}
    assert agent.rewards == [("gym", 0.5), ("gym", 0.5), ("gym", 0.0)], "the wrong number ends it"
    first, second, third = agent.heard
    assert [one["content"] for one in first] == ["please", "count to 3"]
    assert [second[0]["content"], third[0]["content"]] == ["1 it is", "2 it is"]


def test_options_are_read_as_env_config_and_extras_are_the_columns_the_seed_and_the_limit(counter: Path) -> None:
    agent = WrittenAgent("2", "4")
    play_steps(open_gym(settings(f"{counter}:Counter", step=2)), agent, prompt="p", target=4)
    assert agent.rewards == [("gym", 0.5), ("gym", 0.5)]

    counter.with_name("seen.py").write_text(
        "class Seen:\n"
        "    def __init__(self, env_config, extras): self.extras, self.path = extras, env_config.place.path\n"
        "    def init(self, prompt): return prompt, {}\n"
        "    def step(self, action): return {'observations': [], 'reward': self.extras['seed'], 'done': self.path == 'here'}\n"
    )
    agent = WrittenAgent("x", seed=77)
    play_steps(open_gym(settings(f"{counter.parent}/seen.py:Seen", place={"path": "here"})), agent, prompt="p")
    assert agent.rewards == [("gym", 77.0)]


def test_a_conversation_that_is_cut_off_keeps_what_was_earned(counter: Path) -> None:
    agent = WrittenAgent("1", "2", limit=2)
    assert play_steps(open_gym(settings(f"{counter}:Counter")), agent, prompt="p", target=9) == {}
    assert agent.rewards == [("gym", 0.5), ("gym", 0.5)] and len(agent.heard) == 3


def test_an_environment_that_fails_ends_its_own_rollout(counter: Path, encoder: ChatEncoder) -> None:
    wrong = {
        "raises": ("environment_raised", "the counter is broken"),
        "dies": ("environment_died", "exit code 7"),
        "none": ("environment_raised", "step returned None; it returns a dict"),
        "silent": ("environment_raised", "no observations, though the episode is not done"),
        "no number": ("environment_raised", "could not convert string to float"),
        "nan": ("environment_reward", "nan"),
    }
    right = ({"target": 2}, ("1<|im_end|>", "2<|im_end|>"))
    marks = {how: counter.with_name(how) for how in wrong}
    failing = [({"target": 2, "how": how, "mark": str(mark)}, ("1<|im_end|>",)) for how, mark in marks.items()]
    rollouts = [right, *failing, right]
    config = EnvironmentConfig(kind="gym", name=f"{counter}:Counter", workers=1)
    first, *found, last = play_said(encoder, config, rollouts)
    for one in (first, last):
        assert isinstance(one, Played) and one.turn_rewards == ({"gym": 0.5}, {"gym": 0.5}), one
        assert [turn.messages[-1]["content"] for turn in one.episode.turns] == ["count to 2", "1 it is"]
    for result, (reason, words) in zip(found, wrong.values(), strict=True):
        assert isinstance(result, Failure) and (result.reason, words in result.detail) == (reason, True), result
    assert [how for how, mark in marks.items() if not mark.exists()] == ["dies"], "the others were closed"


def test_what_is_no_environment_is_refused(counter: Path) -> None:
    for name, words in {
        "": "environment.name is missing",
        f"{counter}:Countr": "did you mean Counter?",
        f"{counter}:OneMethod": "has no method step",
        f"{counter}:RESULTS": "cannot be called",
        f"{counter.parent}/gone.py:Counter": "there is no file",
        "no.such.module:Env": "importing no.such.module failed: ModuleNotFoundError",
        "textwrap:TextWraper": "textwrap defines no TextWraper; did you mean TextWrapper?",
    }.items():
        with pytest.raises(ConfigError) as error:
            open_gym(settings(name))
        assert words in str(error.value), str(error.value)


@pytest.mark.slow
def test_environments_of_skyrl_gym(encoder: ChatEncoder) -> None:
    pytest.importorskip("skyrl_gym")
    with pytest.raises(ConfigError, match="is not an environment of skyrl-gym; did you mean gsm8k"):
        open_gym(settings("gsm8"))
    row = {"reward_spec": {"ground_truth": "72"}, "extra_info": {}}
    config = EnvironmentConfig(kind="gym", name="gsm8k_multi_turn", max_turns=3, workers=1)
    says = ("70 or so<|im_end|>", "#### 71<|im_end|>", "#### 72<|im_end|>")
    (found,) = play_said(encoder, config, [(row, says)])
    assert isinstance(found, Played), found
    rewards = [turn_reward.get("gym") for turn_reward in found.turn_rewards]
    assert rewards == [0.0, pytest.approx(0.2 / 3), 1.0], "max_turns is the run's"
    assert "Now provide only the final numeric answer" in found.episode.turns[2].messages[0]["content"]


# --- problems of reasoning-gym, with further attempts ------------------------------------------------------------------------

ENTRY = {"question": "4 + 3 =", "answer": "7", "metadata": {"source_dataset": "chain_sum", "source_index": 0}}


def test_a_wrong_answer_may_be_followed_by_another() -> None:
    play = open_reasoning_gym(settings(discount=0.5, feedback="no"))
    agent = WrittenAgent("8", "9", " 7 ", "never said")
    assert play_steps(play, agent, prompt="4 + 3 =", **columns_of(ENTRY)) == {"reasoning_gym": 0.25}
    assert [one[0]["content"] for one in agent.heard] == ["4 + 3 =", "no", "no"]


def test_attempts_end_with_the_limit() -> None:
    play = open_reasoning_gym(settings(max_turns=2))
    agent = WrittenAgent("8", "9", "7")
    assert (
        play_steps(play, agent, prompt="4 + 3 =", **columns_of(ENTRY))["reasoning_gym"] < 0.1 and len(agent.heard) == 2
    )
    cut = WrittenAgent("8", limit=0)
    assert play_steps(play, cut, prompt="4 + 3 =", **columns_of(ENTRY)) == {}, (
        "nothing was answered, so there is nothing to score"
    )


def test_rows_of_another_task_are_named() -> None:
    with pytest.raises(ValueError, match='plays the problems of task.kind = "reasoning_gym"'):
        play_steps(open_reasoning_gym(settings()), WrittenAgent("7"), prompt="4 + 3 =", answer="7")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (settings("chain_sum"), "the problems are those of task.kind"),
        (
            settings(discout=0.5),
            'discout is not an option of environment.kind = "reasoning_gym"; did you mean discount?',
        ),
        (settings(discount="half"), "is of another type than its default 0.8"),
        (settings(discount=2.0), "discount = 2 is not between 0 and 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: LibrarySettings, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_reasoning_gym(given)
    assert words in str(error.value)


# --- games of textarena --------------------------------------------------------------------------------------------------------


def number_of(seed: int) -> int:
    """The number that GuessTheNumber-v0 draws after its seed."""
    return random.Random(seed).randint(1, 20)


def test_a_game_is_played_and_its_result_is_the_reward() -> None:
    play, right = open_textarena(settings("GuessTheNumber-v0")), number_of(6)
    wrong = right - 1 if right > 1 else right + 1
    agent = WrittenAgent(f"[{wrong}]", f"is it {right}?", f"[{right}]")
    assert play_steps(play, agent, prompt="seed 6", seed=6) == {"textarena": 1.0}
    first, second, third = (one[0]["content"] for one in agent.heard)
    assert "You have to guess the number between 1 and 20" in first
    assert second == f"The target number is {'higher' if wrong < right else 'lower'}.", "what is new, and nothing else"
    assert "invalid move" in third and f"is it {right}" not in third, "the game's own rule, without the move"


def test_invalid_moves_end_a_game_by_its_own_rule() -> None:
    play = open_textarena(settings("GuessTheNumber-v0", min_number=1, max_number=101))
    agent = WrittenAgent("[1]", "hm", "hm", "[2]")
    (result,) = play_steps(play, agent, prompt="p", seed=6).values()
    right = random.Random(6).randint(1, 101)
    assert result == pytest.approx(1 - (right - 1) / 100) and len(agent.heard) == 3


def test_a_game_that_is_cut_off_has_no_result_unless_one_is_set() -> None:
    wrong = "[1]" if number_of(6) > 1 else "[2]"
    with pytest.raises(RuntimeError, match="cut off at environment.max_turns .* environment.options.unfinished"):
        play_steps(open_textarena(settings("GuessTheNumber-v0")), WrittenAgent(wrong), prompt="p", seed=6)
    play = open_textarena(settings("GuessTheNumber-v0", unfinished=-0.5))
    assert play_steps(play, WrittenAgent(wrong), prompt="p", seed=6) == {"textarena": -0.5}


def test_the_model_plays_both_players_of_a_game_for_two() -> None:
    """The first wins: its row is 0, 1, 2. Each sees the other's moves and never what the other was told."""
    play = open_textarena(settings("TicTacToe-v0"))
    one, two = WrittenAgent("[0]", "[1]", "[2]"), WrittenAgent("[3]", "[4]")
    agent = WrittenAgent(player_0=one, player_1=two)
    assert play_steps(play, agent, prompt="p", seed=3) == {}
    assert (one.rewards, two.rewards, agent.heard) == ([("textarena", 1.0)], [("textarena", -1.0)], [])
    first, second = (said[0]["content"] for said in two.heard)
    assert "You are Player 1" in first and "You are Player 0" not in first and "Player 0 placed" in first
    assert "Player 0 placed" in second and "You are Player 1" not in second, "what is new, and nothing else"


def test_a_player_without_a_move_gets_no_reward_and_both_get_that_of_a_game_that_was_cut_off() -> None:
    play = open_textarena(settings("TicTacToe-v0"))
    one, two = WrittenAgent("hm", "hm", "hm"), WrittenAgent("[3]")
    play_steps(play, WrittenAgent(player_0=one, player_1=two), prompt="p", seed=3)
    assert one.rewards == [("textarena", -1.0)] and not two.heard and not two.rewards, "it lost by an invalid move"
    cut = open_textarena(settings("TicTacToe-v0", unfinished=-0.5))
    one, two = WrittenAgent("[0]"), WrittenAgent("[3]")
    assert play_steps(cut, WrittenAgent(player_0=one, player_1=two), prompt="p", seed=3) == {}
    assert one.rewards == two.rewards == [("textarena", -0.5)]


class Dice(textarena.Env):
    """A game that says what it draws."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(player_prompt_function=lambda player_id, game_state: f"{random.random()}")

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        rolled = f"{random.random()} {np.random.random()}"
        self.state.add_observation(rolled, textarena.ObservationType.GAME_MESSAGE)
        return self.state.step()  # type: ignore[no-any-return]


def test_games_that_run_at_once_draw_their_own_random_numbers() -> None:
    """Two games in turns, with other draws in between, and the first alone: it says the same."""

    def played(game: Game, between: Callable[[], object]) -> list[str]:
        said = [game.said()[1]]
        for _ in range(3):
            between()
            assert not game.over("roll")
            said.append(game.said()[1])
        return said

    alone, other = played(Game(Dice, 4, 1), lambda: None), Game(Dice, 5, 1)
    again = played(Game(Dice, 5, 1), lambda: None)
    python, numpy = zip(*(one.split() for one in alone[1:] + again[1:]), strict=True)
    assert len(set(python)) == len(set(numpy)) == 6, "they do draw, and each its own"
    state = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert played(Game(Dice, 4, 1), lambda: other.over("roll")) == alone
    after = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert after == state, "nor do they change what the process draws"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (settings(), "environment.name is missing"),
        (settings("GuesTheNumber-v0"), "is not a game of textarena; did you mean GuessTheNumber-v0"),
        (settings("PublicGoodsGame-v0"), "with 2: ValueError: it is for another number of players"),
        (settings("ThreeCardMonte-v0"), "for a reward, which is not a number"),
        (settings("GuessTheNumber-v0", max_numbr=3), "unexpected keyword argument 'max_numbr'"),
        (settings("GuessTheNumber-v0", unfinished="no"), "unfinished = 'no' is not a number"),
    ],
)
def test_games_that_cannot_be_played_are_refused(given: LibrarySettings, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_textarena(given)
    assert words in str(error.value), str(error.value)


def test_games_need_seeds() -> None:
    with pytest.raises(ValueError, match='set task.kind = "seeds"'):
        play_steps(open_textarena(settings("GuessTheNumber-v0")), WrittenAgent("[1]"), prompt="p")


@pytest.mark.slow
def test_games_in_a_process_of_environments(encoder: ChatEncoder) -> None:
    config = EnvironmentConfig(kind="textarena", name="GuessTheNumber-v0", workers=1)
    right = [(number_of(seed), seed) for seed in range(8)]
    rollouts: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"seed": seed}, (f"[{number}]<|im_end|>",)) for number, seed in right
    ]
    found = play_said(encoder, config, [*rollouts, ({}, ("[1]<|im_end|>",))])
    for one in found[:-1]:
        assert isinstance(one, Played) and one.rewards == {"textarena": 1.0} and len(one.episode.turns) == 1, one
    assert isinstance(found[-1], Failure) and found[-1].reason == "environment_raised"


# --- settings ----------------------------------------------------------------------------------------------------------------

MINIMAL = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows.jsonl"}}


def test_prompts_without_a_question_need_an_environment_that_asks() -> None:
    with pytest.raises(ConfigError, match='task.kind = "seeds" has no questions, and the environment asks none'):
        load_config({**MINIMAL, "task": {"kind": "seeds"}, "reward": {"function": "a.py:f"}})
    assert load_config({**MINIMAL, "task": {"kind": "seeds"}, "environment": {"function": "a.py:f"}})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"kind": "gym", "tools": "hermes"}, "environment.tools belongs to environment.function, which is not set"),
        ({"kind": "gym", "function": "a.py:f"}, "are both set; keep one of them"),
        ({"function": "a.py:f", "name": "gsm8k"}, "environment.name belongs to an environment of another library"),
        ({"options": {"a": 1}}, "environment.options belongs to environment.function, or to an environment"),
        ({"kind": "gim"}, f"is not one of the environments: {', '.join((*ENVIRONMENTS, *LIBRARIES))}"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(environment: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({**MINIMAL, "environment": environment})
    assert words in str(error.value), str(error.value)


def test_an_environment_of_a_library_gives_the_rewards_and_needs_the_chat_template() -> None:
    config = load_config({**MINIMAL, "environment": {"kind": "gym", "name": "gsm8k", "max_turns": 3}}).environment
    assert config.rewards and config.turns == 3
    with pytest.raises(ConfigError, match='environment.kind = "gym" talks through the chat template'):
        load_config({**MINIMAL, "task": {**MINIMAL["task"], "chat": False}, "environment": {"kind": "gym"}})
