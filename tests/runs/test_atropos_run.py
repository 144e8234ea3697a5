"""Whole runs that environments of Atropos play: one in a thread of the test, and one of the real atroposlib in an interpreter of its own.

atroposlib brings many packages that headrace does not need: the slow test uses the interpreter of .venv-atropos (`make atropos-setup`), or
$HEADRACE_ATROPOS_PYTHON, and is skipped without one."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import headrace
from headrace.core.types import Scored
from headrace.durable.journal import read_steps
from headrace.episodes.environments.kinds import ADDRESS_FILE
from headrace.facts.facts import GroupEnded, RunEnded
from support.tiny_run import has_step, killed_at_end, of, tiny_config

PYTHON = os.environ.get("HEADRACE_ATROPOS_PYTHON") or str(Path(__file__).parents[2] / ".venv-atropos/bin/python")
LONGEST = 400
GROUP = 4


def config_of(directory: Path, model: Path, **tables: Any) -> dict[str, Any]:
    return tiny_config(
        directory,
        model,
        **{
            "task": {"kind": "seeds", "path": "", "held_out": 0},
            "reward": {"function": ""},
            "environment": {"kind": "atropos", "seconds": 120.0},
            "engine": {"context_length": 256},
            "rollout": {"group_size": GROUP},
            "eval": {"prompts": 0},
            "train": {"steps": 3},
            **tables,
        },
    )


def address_of(directory: Path, not_this: str = "") -> str:
    """The address of the run, once it has one. `not_this`: that of the process that was killed."""
    file, deadline = directory / "logs" / ADDRESS_FILE, time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        if file.exists() and (found := file.read_text().strip()) != not_this:
            return found
        time.sleep(0.05)
    raise AssertionError("the run has published no address of its own")


def ask(address: str, path: str, body: Any) -> Any:
    with urlopen(
        Request(f"{address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    ) as answer:
        return json.loads(answer.read())


def sampled_group(address: str, number: int) -> dict[str, Any]:
    """Samples a group, and scores it. `number`: the second token of its prompt."""
    prompt = [3, number, 2, 4]
    said = ask(address, "generate", {"prompt": {"prompt_token_ids": prompt}, "n": GROUP, "logprobs": 0})
    sampled = [[int(next(iter(one[0]))) for one in sequence] for sequence in said["logprobs"]]
    masks = [[-100] * len(prompt) + one for one in sampled]
    return {
        "tokens": [prompt + one for one in sampled],
        "masks": masks,
        "scores": [len(set(one)) / 8 for one in sampled],
    }


def play(directory: Path, not_at: str = "") -> None:
    """An environment: one group after the other, until the run is over."""
    address, number = address_of(directory, not_at), 0
    try:
        while True:
            ask(address, "scored_data", sampled_group(address, 6 + number % 10))
            number += 1
    except (URLError, ConnectionError):
        pass


def scored_of(directory: Path) -> list[Scored]:
    return [rollout for step in read_steps(directory) for group in step.groups for rollout in group.scored]


def test_an_environment_that_draws_its_own_problems_plays_a_run(tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "tiny"
    threading.Thread(target=play, args=(directory,), daemon=True).start()
    assert headrace.train(config_of(tmp_path, tiny_llama)).reason == "finished"
    scored = scored_of(directory)
    assert len(list(read_steps(directory))) == 3
    for rollout in scored:
        (turn,) = rollout.episode.turns
        assert turn.context[0] == 3 and turn.context[2:] == (2, 4), "the environment's prompt, not the task's"
        assert rollout.rewards == {"score": len(set(turn.completion.tokens)) / 8}
    assert {version for rollout in scored for version in rollout.episode.turns[0].completion.versions()} > {0}
    assert not any(fact.failures for fact in of(directory, GroupEnded))


@pytest.mark.slow
def test_a_group_in_hand_when_the_run_is_killed_is_lost_and_counted(tiny_llama: Path, tmp_path: Path) -> None:
    """The environment has sampled it and not posted it. The resumed run has another address, its ticket is played again, and what was posted
    before is trained once."""
    directory = tmp_path / "runs" / "tiny"
    config = config_of(tmp_path, tiny_llama, train={"steps": 6})
    posted: list[list[int]] = []
    with killed_at_end(config):
        address = address_of(directory)
        while not has_step(directory):
            group = sampled_group(address, 6)
            ask(address, "scored_data", group)
            posted += group["tokens"]
        in_hand = sampled_group(address, 7)["tokens"]
    threading.Thread(target=play, args=(directory, address), daemon=True).start()
    assert headrace.train(resume=directory).reason == "finished"
    steps = list(read_steps(directory))
    tickets = [group.ticket for step in steps for group in step.groups]
    assert len(steps) == 6 and len(tickets) == len(set(tickets)), "no ticket is trained twice"
    trained = [[*turn.context, *turn.completion.tokens] for one in scored_of(directory) for turn in one.episode.turns]
    assert any(one in posted for one in trained)
    ended = of(directory, GroupEnded)
    assert not any(fact.failures for fact in ended)
    assert sum(fact.lost_tokens for fact in ended) >= sum(len(one) - 4 for one in in_hand)
    (last,) = of(directory, RunEnded)[-1:]
    assert last.accounting.balance() == 0


ENV = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
import asyncio

class Letters(BaseEnv):
    name = "letters"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(wandb_name="letters", use_wandb=False, group_size=4, total_steps=100000, max_num_workers=4)
        return config, [APIServerConfig(server_type="vllm", api_key="none")]

    async def setup(self):
        self.drawn = 0

    async def get_next_item(self):
        self.drawn += 1
        return self.drawn

    async def rollout(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            talk = [{"role": "user", "content": f"say {item}"}]
            for more in ("more?", None):
                reply = (await managed.chat_completion(messages=talk, n=1, max_tokens=6, temperature=1.0)).choices[0]
                talk += [{"role": "assistant", "content": reply.message.content}, {"role": "user", "content": more}]
            (node,) = managed.get_state()["nodes"]
            return node

    async def collect_trajectories(self, item):
        nodes = await asyncio.gather(*(self.rollout(item) for _ in range(self.config.group_size)))
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for node in nodes:
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["scores"].append(len(set(node.tokens)) / 8)
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass

Letters.cli()
"""


@contextmanager
def environment_of(place: Path, directory: Path, model: Path, not_at: str = "") -> Iterator[None]:
    """Starts the environment as its users do, once the run has an address (other than that)."""
    (place / "letters.py").write_text(ENV)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        address = address_of(directory, not_at)
        words = [PYTHON, "letters.py", "serve", "--env.rollout_server_url", address, "--env.tokenizer_name", str(model)]
        words += ["--openai.base_url", f"{address}/v1", "--openai.model_name", str(model)]
        words += ["--env.steps_per_eval", "0", "--env.ensure_scores_are_not_same", "false"]
        names = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        with (place / "env.log").open("wb") as log:
            started.append(subprocess.Popen(words, cwd=place, env=names, stdout=log, stderr=log))

    starting = threading.Thread(target=start)
    starting.start()
    try:
        yield
    finally:
        starting.join(LONGEST)
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow  # importing atroposlib takes seconds of CPU time, and it waits for five before it begins
@pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no atroposlib in {PYTHON}: make atropos-setup")
def test_an_environment_of_atroposlib_plays_a_run(tiny_llama: Path, tmp_path: Path) -> None:
    """Two turns of a `managed_server` for each rollout: its tokens, and what was sampled for the ticket, are the same."""
    directory = tmp_path / "runs" / "tiny"
    with environment_of(tmp_path, directory, tiny_llama):
        assert headrace.train(config_of(tmp_path, tiny_llama)).reason == "finished", (tmp_path / "env.log").read_text()
    for one in scored_of(directory):
        first, second = one.episode.turns
        assert second.parents == (0,)
        path = (*first.context, *first.completion.tokens, *second.context, *second.completion.tokens)
        assert one.rewards == {"score": len(set(path)) / 8}
    ended = of(directory, GroupEnded)
    assert not any(fact.failures for fact in ended)
    assert sum(fact.outcome == "ready" for fact in ended) >= len(list(read_steps(directory))) == 3
    assert "the environment letters_0 has registered" in (directory / "logs" / "environment.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no atroposlib in {PYTHON}: make atropos-setup")
def test_an_environment_of_atroposlib_is_started_again_with_its_run(tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "tiny"
    config, deadline = config_of(tmp_path, tiny_llama, train={"steps": 6}), time.monotonic() + LONGEST
    with environment_of(tmp_path, directory, tiny_llama), killed_at_end(config) as run:  # which is killed first
        address = address_of(directory)
        while not has_step(directory):
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "env.log").read_text()
            time.sleep(0.01)
    with environment_of(tmp_path, directory, tiny_llama, address):
        assert headrace.train(resume=directory).reason == "finished", (tmp_path / "env.log").read_text()
    tickets = [group.ticket for step in read_steps(directory) for group in step.groups]
    assert len(tickets) == len(set(tickets)) and len(list(read_steps(directory))) == 6
    assert not any(fact.failures for fact in of(directory, GroupEnded))
