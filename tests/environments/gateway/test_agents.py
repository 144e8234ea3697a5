"""Agents as processes: what they are given, how their rewards are read, and that each of their failures is its own rollout's only."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, RolloutFailed
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.agent_environment import open_agents
from headrace.episodes.environments.agents.agent_process import printed_reward
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Played
from headrace.run.config import load_config
from support import tool_chats
from support.gateway.written_turns import Model, encoder_of
from support.runs.processes import gone

AGENT = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).parent
given = json.load(sys.stdin)
mode = given["columns"]["modes"][given["seed"]]
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

def wait_for(name):
    while not (HERE / name).exists():
        time.sleep(0.01)
    return (HERE / name).read_text()

def chat(text, key=key):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    with urlopen(Request(url + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

if mode == "exits":
    sys.exit(0)
if mode == "grows":
    kept = bytearray(300 << 20)
if mode == "hogs":
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", "kept = bytearray(b'x') * (90 << 20); import time; time.sleep(10000)"])
    time.sleep(10000)
if mode == "crashes":
    raise KeyError("no such thing")
if mode == "holds":
    host, port = url.split("/")[2].split(":")
    line = socket.create_connection((host, int(port)))
    path = "/" + url.split("/", 3)[3] + "/chat/completions"
    line.sendall(f"POST {path} HTTP/1.1\\r\\nHost: {host}\\r\\nContent-Type: application/json\\r\\nContent-Length: 99\\r\\n\\r\\n{{".encode())
    (HERE / "held").write_text(f"{os.getpid()} {os.getcwd()}")
    time.sleep(10000)
if mode == "steals":
    try:
        chat("?", wait_for("key"))
    finally:
        (HERE / "tried").write_text("")
text = chat(given["prompt"])
if mode == "good":
    (HERE / "part").write_text(key)
    (HERE / "part").rename(HERE / "key")
    Path("of my own").write_text(os.getcwd())
    if "steals" in given["columns"]["modes"]:
        wait_for("tried")  # the key of a rollout that is over belongs to nobody
    print("the answer is", text)
    print(1.5)
if mode == "edits":
    Path(__file__).write_text(Path(__file__).read_text() + "# another one now")
    print(0.5)
if mode == "named":
    print(json.dumps({"right": 1, "short": -0.5}))
if mode == "nan":
    print(float("nan"), "\\nNaN")
if mode == "words":
    print("done")
if mode == "child":
    child = subprocess.Popen(["sleep", "10000"])
    (HERE / "child").write_text(str(child.pid))
    print(1)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def played(place: Path, *modes: str, alone: bool = True, **settings: Any) -> list[Played | Failure]:
    """Plays a rollout for each mode, side by side."""
    (place / "agent.py").write_text(AGENT)
    encoder = encoder_of(place / "model", tool_chats.PLAIN)
    model = Model(encoder, ["so<|im_end|>"] * 9)
    config = EnvironmentConfig(kind="process", command=(sys.executable, str(place / "agent.py")), **settings)

    async def main() -> list[Played | Failure]:
        kind = open_agents(OpenedWith(config=config, encoder=encoder, alone=alone, log=place / "environment.log"))
        prompt = Prompt("p", "hello", (1,), columns={"modes": list(modes)})
        try:
            return await roll_out(kind, prompt, range(len(modes)), ask=model, decode=encoder.decode)
        finally:
            await kind.close()

    return asyncio.run(main())


def test_every_failure_is_that_of_its_own_rollout(tmp_path: Path) -> None:
    modes = ("good", "named", "exits", "crashes", "steals", "nan", "silent", "words", "child", "killed")
    found = dict(zip(modes, played(tmp_path, *modes), strict=True))
    rewards = {mode: one.rewards for mode, one in found.items() if isinstance(one, Played)}
    assert rewards == {"good": {"agent": 1.5}, "named": {"right": 1.0, "short": -0.5}, "child": {"agent": 1.0}}
    failures = {mode: one for mode, one in found.items() if isinstance(one, Failure)}
    assert {mode: failure.reason for mode, failure in failures.items()} == {
        "exits": "environment_turns",
        "crashes": "agent_exit",
        "steals": "agent_exit",
        "nan": "environment_reward",
        "silent": "environment_reward",
        "words": "environment_reward",
        "killed": "agent_exit",
    }
    assert "without asking for a turn" in failures["exits"].detail
    assert failures["crashes"].kind == "KeyError" and "exit code 1; it said: KeyError" in failures["crashes"].detail
    assert "the key belongs to another rollout" in failures["steals"].detail
    assert "is nan, not a finite number" in failures["nan"].detail
    assert "printed no reward" in failures["silent"].detail and "'done'" in failures["words"].detail
    assert "was killed by SIGKILL" in failures["killed"].detail
    assert "no such thing" in (tmp_path / "environment.log").read_text()
    assert gone(int((tmp_path / "child").read_text())), "what it started ends with it"


def test_one_that_takes_too_much_memory_ends_alone(tmp_path: Path) -> None:
    """At once in one process, or together with the processes that it starts. Where nobody looks at the memory, it ends after its seconds."""
    grows, hogs, good = played(tmp_path, "grows", "hogs", "good", memory_gib=0.2, seconds=60.0)
    assert isinstance(good, Played)
    assert isinstance(grows, Failure) and (grows.reason, grows.kind) == ("environment_memory", "MemoryError")
    assert isinstance(hogs, Failure) and hogs.reason == "environment_memory"
    assert "GiB; environment.memory_gib = 0.2 is the limit" in hogs.detail


@pytest.mark.waits
def test_one_that_keeps_its_connection_open_is_ended_after_its_seconds(tmp_path: Path) -> None:
    held, good = played(tmp_path, "holds", "good", seconds=15.0)
    assert isinstance(good, Played)
    assert isinstance(held, Failure) and held.reason == "environment_timeout" and "more than 15 s" in held.detail
    pid, directory = (tmp_path / "held").read_text().split()
    assert gone(int(pid)) and not Path(directory).exists() and directory != str(tmp_path)


def test_a_reward_function_alone_is_asked_where_there_is_one(tmp_path: Path) -> None:
    (one,) = played(tmp_path, "words", alone=False)
    assert isinstance(one, Played) and one.rewards == {}


def test_an_agent_whose_file_changes_during_a_run_is_not_started(tmp_path: Path) -> None:
    """It would play otherwise than those before it, and nothing would say so."""
    before, after = played(tmp_path, "edits", "good", processes=1)
    assert isinstance(before, Played) and before.rewards == {"agent": 0.5}
    assert isinstance(after, Failure) and after.reason == "agent_exit"
    assert "agent.py has changed since the run began" in after.detail


def test_a_directory_of_the_user_stays(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (one,) = played(tmp_path, "good", directory=str(place), processes=1)
    assert isinstance(one, Played) and (place / "of my own").read_text() == str(place)


@pytest.mark.parametrize(
    ("output", "rewards"), [("1", 1.0), ("a\n -0.5 \n\n", -0.5), ("true", 1.0), ('{"a": 1, "b": false}', None)]
)
def test_the_last_line_is_the_reward(output: str, rewards: float | None) -> None:
    assert printed_reward(output) == ({"agent": rewards} if rewards is not None else {"a": 1.0, "b": 0.0})


@pytest.mark.parametrize(
    "output",
    [
        *("", "\n \n", "1\nbye", "{}", "[1]", '{"a": "1"}', "null", "9" * 400, "[" * 9000),
        *('{"a": 0, "a": 1}', '{"solver": {"a": 1, "b": 2, "a": 1}}'),
    ],
)
def test_what_is_no_reward_is_a_failure(output: str) -> None:
    with pytest.raises(RolloutFailed) as failed:
        printed_reward(output)
    assert failed.value.reason == "environment_reward"


MINIMAL = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"kind": "process"}, r'needs environment.command = \["python", "agent.py"\]'),
        ({"kind": "process", "command": "agent 'open"}, "cannot be split into words"),
        ({"command": ["agent"]}, 'environment.command belongs to environment.kind = "process"'),
        ({"kind": "process", "command": ["a"], "workers": 3}, "environment.workers belongs to another kind"),
        ({"kind": "process", "command": ["a"], "function": "a.py:f"}, "are both set"),
        ({"function": "a.py:f", "processes": 3}, "environment.processes belongs to"),
    ],
)
def test_settings_that_cannot_work_are_refused(environment: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**MINIMAL, "environment": environment})


def test_a_command_is_split_and_its_files_are_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[task]\nkind = "jsonl"\npath = "rows.jsonl"\n[environment]\nkind = "process"\n'
        'command = "python agent.py --task \'a b\'"\ndirectory = "."\n'
    )
    environment = load_config(tmp_path / "run.toml").environment
    assert environment.command == ("python", os.path.realpath(tmp_path / "agent.py"), "--task", "a b")
    assert environment.directory == os.path.realpath(tmp_path) and environment.rewards and environment.turns == 8


def test_a_command_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    config = EnvironmentConfig(kind="process", command=("no-such-agent",))
    with pytest.raises(ConfigError, match="no-such-agent, which is not a program that can be run here"):
        open_agents(OpenedWith(config=config, encoder=encoder_of(tmp_path, tool_chats.PLAIN)))
