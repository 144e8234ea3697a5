"""A whole run whose rollouts are played by a command of the user, which knows nothing but the URL of its rollout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.commands.running.running_commands import use_gateway
from headrace.durable.journal import read_steps
from headrace.episodes.environments.kinds import ADDRESS_FILE
from headrace.facts.facts import Evaluated, GroupEnded
from support.runs.beside import Beside, until
from support.runs.processes import alive
from support.server_processes import config_for, serving, vllm
from support.tiny_run import HOLD, hold, kill_when, of, release, tiny_config

AGENT = (
    HOLD
    + """
import os, socket, sys

given = json.load(sys.stdin)
mode = sys.argv[1]
number = int(given["columns"]["answer"]) if not given["prompt"].startswith("None") else 0

def post(body, key):
    # A client library would be imported for longer than the agent plays.
    host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    connection = socket.create_connection((host.partition(":")[0], int(host.partition(":")[2])))
    head = f"POST /{path}/chat/completions HTTP/1.0\\r\\nHost: {host}\\r\\nContent-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n"
    connection.sendall((head + (f"Authorization: Bearer {key}\\r\\n" if key else "") + "\\r\\n").encode() + body)
    answer = connection.makefile("rb")
    status = answer.readline()
    assert b" 200 " in status, status
    while answer.readline().strip():
        pass
    return answer

def chat(messages, **more):
    body = json.dumps({"model": "gpt", "messages": messages, **more}).encode()
    with post(body, os.environ["OPENAI_API_KEY"]) as answer:
        return json.load(answer)["choices"][0]["message"]

def streamed(messages):
    global pieces
    body = json.dumps({"messages": messages, "stream": True, "logprobs": True}).encode()
    content = ""
    with post(body, "") as answer:
        for line in answer:
            if line.startswith(b"data: {") and (choice := json.loads(line[6:])["choices"][0])["logprobs"]:
                content, pieces = content + choice["delta"]["content"], pieces + 1
    return {"role": "assistant", "content": content}

pieces = 0
talk = [{"role": "user", "content": given["prompt"]}]
if mode == "logs":
    with (HERE / "log").open("a") as log:
        log.write(f"{os.getpid()} {given['seed']} {os.getcwd()}\\n")
talk.append(chat(talk))
while is_held():
    (HERE / "middle").touch()
    time.sleep(0.02)
talk.append({"role": "user", "content": "more?"})
talk.append(streamed(talk) if mode == "stream" else chat(talk))
text = talk[-1]["content"]
if mode == "half" and given["seed"] % 2:
    raise RuntimeError("half of them fail")
print("some words of the agent")
print(json.dumps({"e": text.count("e") / max(len(text), 1), "length": 0.01 * len(text), "pieces": pieces * 1e-9}))
"""
)


def config_of(directory: Path, model: Path, mode: str = "play", **tables: Any) -> dict[str, Any]:
    (directory / "agent.py").write_text(AGENT)
    environment = {"kind": "process", "command": [sys.executable, "-S", str(directory / "agent.py"), mode]}
    return tiny_config(
        directory,
        model,
        **{
            "reward": {"function": ""},
            "environment": environment,
            "engine": {"context_length": 128},
            "train": {"steps": 2},
            **tables,
        },
    )


@pytest.mark.slow
def test_a_command_plays_the_rollouts_of_a_run(tiny_llama: Path, tmp_path: Path) -> None:
    """The second turn is a stream, whose pieces arrive while it is sampled."""
    tables = {
        "eval": {"prompts": 2, "samples": 1},
        "rollout": {"max_tokens": 100},  # so many passes that no busy machine hands them all on at once
        "engine": {"context_length": 256},
    }
    result = headrace.train(config_of(tmp_path, tiny_llama, "stream", **tables))
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
            assert rollout.rewards.keys() == {"e", "length", "pieces"}
            assert rollout.rewards["length"] == pytest.approx(0.01 * len(second.reply["content"]))
    pieces = [rollout.rewards["pieces"] * 1e9 for step in steps for group in step.groups for rollout in group.scored]
    assert max(pieces) > 1.5, "the engine's passes, and not one piece at the end of each turn"
    assert all(not fact.failures for fact in of(directory, GroupEnded))
    assert all(not fact.failures and fact.prompts == 2 for fact in of(directory, Evaluated))


@pytest.mark.slow
def test_the_same_command_is_trained_against_vllm(tiny_llama: Path, tmp_path: Path) -> None:
    own = config_of(tmp_path, tiny_llama)
    with serving(vllm(tiny_llama)) as server:
        tables = {name: own[name] for name in ("environment", "reward", "train")}
        assert headrace.train(config_for(tmp_path, tiny_llama, server, **tables)).reason == "finished"
    steps = list(read_steps(tmp_path / "runs" / "tiny"))
    scored = [rollout for step in steps for group in step.groups for rollout in group.scored]
    assert len(steps) == 2 and {len(rollout.episode.turns) for rollout in scored} == {2}
    assert not any(fact.failures for fact in of(tmp_path / "runs" / "tiny", GroupEnded))


@pytest.mark.slow
def test_agents_that_nobody_starts_take_the_rollouts_of_a_run(tiny_llama: Path, tmp_path: Path) -> None:
    """`headrace gateway RUN -- COMMAND` plays them until the run is over."""
    command = config_of(tmp_path, tiny_llama)["environment"]["command"]
    config = config_of(
        tmp_path, tiny_llama, environment={"kind": "gateway", "command": []}, eval={"prompts": 2, "samples": 1}
    )
    directory, ended = tmp_path / "runs" / "tiny", list[int]()
    address = directory / "logs" / ADDRESS_FILE

    def elsewhere() -> None:
        until(address.exists)
        ended.append(use_gateway(str(directory), command, 4))

    agents = Beside(elsewhere)
    assert headrace.train(config).reason == "finished"
    agents.join()
    assert ended == [0] and not address.exists()
    steps = list(read_steps(directory))
    scored = [rollout for step in steps for group in step.groups for rollout in group.scored]
    assert len(steps) == 2 and {len(rollout.episode.turns) for rollout in scored} == {2}
    assert not any(fact.failures for fact in [*of(directory, GroupEnded), *of(directory, Evaluated)])


@pytest.mark.slow
def test_agents_that_fail_are_data_with_their_last_words(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_llama, "half", watch={"failed_pause": 1.0})
    assert headrace.train(config).reason == "finished"
    directory = tmp_path / "runs" / "tiny"
    ended = of(directory, GroupEnded)
    failed = [fact for fact in ended if fact.failures]
    assert failed and {name for fact in failed for name in fact.failures} == {"agent_exit"}
    assert {name for fact in failed for name in fact.kinds} == {"RuntimeError"}
    assert "ended with exit code 1; it said: RuntimeError: half of them fail" in failed[0].detail
    assert "half of them fail" in (directory / "logs" / "environment.log").read_text()


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_episodes_starts_them_again(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_llama, "logs", train={"steps": 4})
    directory, log = tmp_path / "runs" / "tiny", tmp_path / "log"
    hold(tmp_path, 1)
    kill_when(config, (tmp_path / "middle").exists)
    release(tmp_path, 1)
    first = [line.split() for line in log.read_text().splitlines()]
    until(lambda: not any(alive(int(one[0])) or Path(one[2]).exists() for one in first))  # they end with the run
    assert headrace.train(resume=directory).reason == "finished"
    again = [line.split()[1] for line in log.read_text().splitlines()[len(first) :]]
    assert {seed for _, seed, _ in first} & set(again), "an episode was under way"
    steps = list(read_steps(directory))
    assert len(steps) == 4 and not any(fact.failures for fact in of(directory, GroupEnded))
    assert not any(fact.lost_tokens for fact in of(directory, GroupEnded)), "the agent asked for the same turns"
    for rollout in (rollout for step in steps for group in step.groups for rollout in group.scored):
        assert rollout.episode.turns[1].parents == (0,)
