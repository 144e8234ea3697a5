"""Games of `textarena` for one player or two: the game's words are the messages, the model's turns are the moves. With two players the
model plays both, each with a conversation of its own that has only what that player sees.

The interface is that of textarena 0.7 (https://github.com/LeonGuertler/TextArena): `make(id)`, `reset(num_players, seed)`,
`get_observation()`, `step(action)`, `close()`. Its wrappers that write the whole history into one text are passed by: a conversation
holds the history already, so that each message has only what is new. Those that format moves stay.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.episodes.environments.libraries.options import Replies, near, not_installed
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.environments.workers.step_driver import LibraryRollout
from headrace.episodes.environments.workers.talk import AgentReply, BlockingAgent

KIND = "textarena"
UNFINISHED = "unfinished"
"""The option that is the reward of a game that was cut off; all others are arguments of the game."""
TRIED_MOVES = 8
"""Invalid moves that are tried at the start. Most games end with the second."""
SILENT = "It is your turn."
"""The message after a move to which a game said nothing."""

_dice = threading.Lock()
"""Games draw from the random numbers of the whole process, so that one at a time may run (`OwnDice`)."""


class OwnDice:
    """The random numbers of one game: those that it draws from Python's and NumPy's global generators follow from its seed alone,
    whatever other games of the process draw in between."""

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % (1 << 32)).get_state()

    @contextmanager
    def rolled(self) -> Iterator[None]:
        """Keeps other games waiting meanwhile. A move takes far less than a millisecond in most games."""
        with _dice:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)


class Game:
    """One game."""

    def __init__(self, make: Callable[[], Any], seed: int, players: int) -> None:
        self._dice = OwnDice(seed)
        with self._dice.rolled():
            self._game = make()
            self._game.reset(num_players=players, seed=seed)
        self.inner = _inner(self._game)

    def said(self) -> tuple[int, str]:
        """Returns the player who is to move, and what that player has seen since its last move. Its own moves are left out, which it has as
        its turns."""
        player, messages = self.inner.get_observation()
        return player, "\n".join(str(text) for speaker, text, _ in messages if speaker != player) or SILENT

    def over(self, move: str) -> bool:
        """Makes a move, and returns whether the game is over. What is no move of the game is the game's affair."""
        with self._dice.rolled():
            over, _ = self._game.step(move)
        return bool(over)

    def result(self, player: int) -> float:
        """Returns the player's reward, of a game that is over. Raises ValueError if the game has none."""
        rewards, _ = self._game.close()
        reward = rewards.get(player) if isinstance(rewards, dict) else None
        if not isinstance(reward, (int, float)):
            raise ValueError(f"the game has ended with {reward!r:.60} for a reward, which is not a number")
        return float(reward)


class GameRollout(LibraryRollout):
    """A rollout: one game. It is subclassed with the settings."""

    make: Callable[[], Any]
    players: int
    unfinished: float | None
    """The reward of a game that is cut off."""
    needs = {"seed": 'set task.kind = "seeds"'}
    """Columns that a row must have: the game follows from its seed, which is one for the group."""

    def __init__(self, seed: int, **columns: Any) -> None:
        self._game, self._replies = Game(type(self).make, seed, self.players), Replies()
        self._moved: list[int] = []
        """The players that have moved."""
        self._player = 0

    def step(self, agent: BlockingAgent, reply: AgentReply | None) -> Any:
        """The rewards of two players are those of their last turns."""
        if reply is None:
            return self._asked()
        if reply.stop == "limit" and self.unfinished is None:
            raise RuntimeError(
                "the game was cut off at environment.max_turns or environment.max_tokens before it had a result: raise them, or set the "
                f"reward of such games, environment.options.{UNFINISHED}"
            )
        if reply.stop != "limit" and not self._moves(reply.text):
            return self._asked()
        cut = self.unfinished if reply.stop == "limit" else None
        results = {player: self._game.result(player) if cut is None else cut for player in self._moved}
        if self.players == 1:
            return {KIND: results.get(0, cut)}
        for player, result in results.items():
            agent.role(_role(player)).reward(KIND, result)
        return {}

    def _asked(self) -> Any:
        self._player, observation = self._game.said()
        self._replies.said(self._player, observation)
        return observation if self.players == 1 else (_role(self._player), observation)

    def _moves(self, move: str) -> bool:
        """Makes a move, and returns whether the game is over."""
        if self._player not in self._moved:
            self._moved.append(self._player)
        self._replies.given(move)
        return self._game.over(move)

    def export_state(self) -> dict[str, Any]:
        return self._replies.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._asked()
        for move in self._replies.again(state):
            self._moves(move)
            self._asked()


def _role(player: int) -> str:
    return f"player {player}"


def open_textarena(settings: LibrarySettings) -> type[GameRollout]:
    """Returns the class that plays a rollout with the game `settings.name`. Its first position follows from the column `seed`.

    Raises ConfigError if textarena is not installed, has no such game, or the game cannot be started or is for more than two players."""
    make, players, unfinished = _made_by(settings)
    return GameRollout.opened(KIND, make=staticmethod(make), players=players, unfinished=unfinished)


def _made_by(settings: LibrarySettings) -> tuple[Callable[[], Any], int, float | None]:
    """Returns what makes a game, the number of its players, and the reward of one that was cut off."""
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError:
        raise not_installed(KIND, "textarena", "textarena") from None
    if settings.name not in ENV_REGISTRY:
        what = (
            f"environment.name = {settings.name} is not a game of textarena"
            if settings.name
            else "environment.name is missing"
        )
        raise ConfigError(f"{what}{near(settings.name, ENV_REGISTRY)}")
    options = dict(settings.options)
    unfinished = options.pop(UNFINISHED, None)
    if unfinished is not None and (not isinstance(unfinished, (int, float)) or isinstance(unfinished, bool)):
        raise ConfigError(f"environment.options.{UNFINISHED} = {unfinished!r} is not a number")

    def make() -> Any:
        return textarena.make(settings.name, **options)

    from textarena import SinglePlayerState, TwoPlayerState

    problems = []
    for players, state in enumerate((SinglePlayerState, TwoPlayerState), 1):
        try:
            _try(make, players, state)
            return make, players, None if unfinished is None else float(unfinished)
        except Exception as error:  # the games check with assert, and each has its own errors
            words = next((line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))), "")
            problems.append(f"with {players}: {type(error).__name__}: {words}")
    raise ConfigError(
        f"environment.name = {settings.name}: neither one player nor two can play this game here ({'; '.join(problems)}); name another game, or "
        "give it what it asks for"
    )


def _try(make: Callable[[], Any], players: int, state: type) -> None:
    """Plays a game with moves that are none. Raises what the game raises, and ValueError if it is for another number of players or its
    result is not a number: some games of textarena 0.7.4 confuse reward and reason of an invalid move."""
    game = Game(make, 0, players)
    if not isinstance(game.inner.state, state):
        raise ValueError("it is for another number of players")
    for _ in range(TRIED_MOVES):
        player, _ = game.said()
        if game.over("no move"):
            game.result(player)
            return


def _inner(game: Any) -> Any:
    """Returns the game without its wrappers, which pass unknown attributes on to it."""
    from textarena import Wrapper

    while isinstance(game, Wrapper):
        game = game.env
    return game
