"""The server of openenv.toml: `pip install openenv`, then `python openenv_server.py`. A session is a game: guess a number between 1 and 20."""

from __future__ import annotations

import random
import re

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class GuessingGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **columns):
        self.number, self.left = random.Random(seed).randint(1, 20), 6
        return Hint(text="Guess a number between 1 and 20.", done=False, reward=None)

    def step(self, action, timeout_s=None, **rest):
        found = re.search(r"\d+", action.message)
        self.left -= 1
        if found and int(found[0]) == self.number:
            return Hint(text="Right.", done=True, reward=1.0)
        hint = "higher" if found and self.number > int(found[0]) else "lower" if found else "I need a number"
        return Hint(text=f"{hint}, please", done=not self.left, reward=0.02 if found else 0.0)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(GuessingGame, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=8000, log_level="warning")
