"""Environments behind servers of openenv: the protocol, with a server that is written here, and the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.libraries.openenv import open_openenv
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.environments.workers.talk import AgentReply
from headrace.episodes.episodes import Played
from headrace.models.chat import ChatEncoder
from support import tool_chats
from support.tool_chats import play_said

PYTHON = os.environ.get("HEADRACE_OPENENV_PYTHON") or str(Path(__file__).parents[2] / ".venv-openenv/bin/python")
"""An interpreter with openenv, which is no package of ours: it brings sixty others (`make openenv-setup`)."""


class Countdown:
    """A server whose environment counts down from the seed. It has room for two sessions."""

    def __init__(self) -> None:
        self.sessions = self.most = self.refused = 0
        self.resets: list[dict[str, Any]] = []
        self.url = ""

    async def serve(self, socket: ServerConnection) -> None:
        if self.sessions >= 2:
            self.refused += 1
            await send(socket, "error", {"message": "full", "code": "CAPACITY_REACHED"})
            return
        self.sessions += 1
        self.most = max(self.most, self.sessions)
        at = 0
        try:
            async for message in socket:
                asked = json.loads(message)
                if asked["type"] == "reset":
                    self.resets.append(asked["data"])
                    at = asked["data"]["seed"] % 10
                    await answer(socket, {"prompt": f"count down from {at}", "left": at}, None, at == 9)
                elif "answer" not in asked["data"]:
                    await send(socket, "error", {"message": "no field answer", "code": "VALIDATION_ERROR"})
                elif asked["data"]["answer"] == "hang up":
                    return
                elif asked["data"]["answer"] == "garble":
                    await socket.send("[]")
                else:
                    await asyncio.sleep(0.01)
                    right = asked["data"]["answer"] == str(at - 1)
                    at -= 1
                    await answer(socket, {"prompt": "on", "left": at}, float(right), at <= 0)
        finally:
            self.sessions -= 1


async def send(socket: ServerConnection, type: str, data: dict[str, Any]) -> None:
    await socket.send(json.dumps({"type": type, "data": data}))


async def answer(socket: ServerConnection, observation: dict[str, Any], reward: float | None, done: bool) -> None:
    await send(socket, "observation", {"observation": observation, "reward": reward, "done": done})


@pytest.fixture(scope="module")
def countdown() -> Iterator[Countdown]:
    server, ready, loop = Countdown(), threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()

    async def main() -> None:
        async with serve(server.serve, "127.0.0.1", 0) as opened:
            server.url = f"http://127.0.0.1:{next(iter(opened.sockets)).getsockname()[1]}"
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait()
    yield server
    loop.call_soon_threadsafe(over.set)
    thread.join()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(tool_chats.save_tokenizer(tmp_path_factory.mktemp("tokens"), tool_chats.HERMES))


def test_rollouts_are_sessions_of_a_server(countdown: Countdown, encoder: ChatEncoder) -> None:
    """Twelve at once, though the server takes two: the others wait, and nothing fails but what fails."""
    options = {"action": "answer", "observation": "prompt"}
    config = EnvironmentConfig(kind="openenv", name=countdown.url, options=options, workers=1)
    countdown.resets.clear()
    right = ({"seed": 12, "level": "hard"}, ("1<|im_end|>", "5<|im_end|>"))
    wrong = {
        "hang up": "ConnectionClosed",
        "garble": "the server answered [] to a step",
    }
    failing = [({"seed": 13}, (f"{says}<|im_end|>",)) for says in wrong]
    found = play_said(encoder, config, [*[right] * 10, *failing])
    for one in found[:10]:
        assert isinstance(one, Played) and one.turn_rewards == ({"openenv": 1.0}, {"openenv": 0.0}), one
        assert [turn.messages[0]["content"] for turn in one.episode.turns] == ["count down from 2", "on"]
    for result, words in zip(found[10:], wrong.values(), strict=True):
        assert isinstance(result, Failure) and result.reason == "environment_raised" and words in result.detail, result
    assert countdown.most == 2 and countdown.refused and countdown.resets.count({"seed": 12, "level": "hard"}) == 10


def test_a_rollout_without_a_seed_has_its_own_and_one_without_a_turn_has_no_reward(
    countdown: Countdown, encoder: ChatEncoder
) -> None:
    config = EnvironmentConfig(kind="openenv", name=countdown.url, options={"action": "answer"}, workers=1)
    said = ("0<|im_end|>",)
    countdown.resets.clear()
    none, first, over = play_said(encoder, config, [({"seed": 19}, said), ({}, said), ({"seed": 11}, said)])
    assert isinstance(none, Failure) and (none.reason, "no reward" in none.detail) == ("environment_reward", True)
    assert isinstance(first, Played) and [
        reset["seed"] for reset in countdown.resets if reset["seed"] not in (0, 19, 11)
    ] == [1]
    assert isinstance(over, Played) and over.turn_rewards == ({"openenv": 1.0},)
    said_first = over.episode.turns[0].messages[0]["content"]
    assert json.loads(said_first) == {"prompt": "count down from 1", "left": 1}, (
        "all of the observation, unless a field is named"
    )


def test_a_wrong_field_of_the_action_is_named(countdown: Countdown, encoder: ChatEncoder) -> None:
    config = EnvironmentConfig(kind="openenv", name=countdown.url, workers=1)
    (found,) = play_said(encoder, config, [({"seed": 12}, ("1<|im_end|>",))])
    assert isinstance(found, Failure)
    assert "the server refused a step: no field answer (VALIDATION_ERROR)" in found.detail


def test_a_session_goes_on_as_another_one_that_is_given_the_same_replies(countdown: Countdown) -> None:
    options = {"action": "answer", "observation": "prompt"}
    made = open_openenv(LibrarySettings(countdown.url, options, 8))
    agent: Any = tool_chats.WrittenAgent()

    def replied(text: str) -> AgentReply:
        return AgentReply(text, (), "stop", 1)

    async def first() -> dict[str, Any]:
        one = made(seed=14, level="hard")
        try:
            assert await one.step(agent, None) == "count down from 4"
            assert await one.step(agent, replied("3")) == "on"
            return one.export_state()
        finally:
            await one.close()

    async def goes_on(state: dict[str, Any], seed: int) -> Any:
        other = made(seed=seed, level="hard")
        other.restore(state)
        try:
            return [await other.step(agent, replied(text)) for text in ("2", "9", "0")]
        finally:
            await other.close()

    countdown.resets.clear()
    state = asyncio.run(first())
    agent.rewards.clear()
    assert asyncio.run(goes_on(state, 14)) == ["on", "on", {}]
    assert agent.rewards == [("openenv", 1.0), ("openenv", 0.0), ("openenv", 1.0)], "and none for the replies before"
    assert countdown.resets == [{"seed": 14, "level": "hard"}] * 2
    with pytest.raises(ValueError, match="says something else than before"):
        asyncio.run(goes_on(state, 15))


def test_what_cannot_be_reached_is_refused(countdown: Countdown) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name, options, words in (
        ("", {}, "environment.name is missing"),
        ("here", {}, "environment.name = here is not a URL"),
        (nobody, {}, "no session could be opened there"),
        (countdown.url, {"observation": "promt"}, "has no field promt; there are: prompt, left"),
        (countdown.url, {"actin": "a"}, "did you mean action?"),
    ):
        with pytest.raises(ConfigError) as error:
            open_openenv(LibrarySettings(name, options, 8))
        assert words in str(error.value), str(error.value)


SERVER = """
import sys
from openenv.core.env_server import Action, Environment, Observation, State, create_app
import uvicorn

class Said(Action):
    message: str

class Heard(Observation):
    echoed: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **rest):
        self.left = 2
        return Heard(echoed=f"seed {seed}", done=False, reward=None)

    def step(self, action, timeout_s=None, **rest):
        self.left -= 1
        return Heard(echoed=action.message.upper(), reward=len(action.message) / 10, done=not self.left)

    @property
    def state(self):
        return self._state

uvicorn.run(create_app(Echo, Said, Heard, max_concurrent_envs=3), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    process = subprocess.Popen([PYTHON, str(tmp_path / "server.py"), str(port)])
    deadline, url = time.monotonic() + 300, f"http://127.0.0.1:{port}"
    try:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=30).close()
                break
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no openenv in {PYTHON}: make openenv-setup")
def test_a_real_server(echo: str, encoder: ChatEncoder) -> None:
    config = EnvironmentConfig(kind="openenv", name=echo, options={"observation": "echoed"}, workers=1)
    found = play_said(encoder, config, [({"seed": seed}, ("hello<|im_end|>", "you<|im_end|>")) for seed in range(8)])
    for seed, one in enumerate(found):
        assert isinstance(one, Played) and one.turn_rewards == ({"openenv": 0.5}, {"openenv": 0.3}), one
        assert [turn.messages[0]["content"] for turn in one.episode.turns] == [f"seed {seed}", "HELLO"]
