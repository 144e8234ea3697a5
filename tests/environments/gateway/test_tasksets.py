"""Tasksets of verifiers: what their processes are asked, how rewards come back, and that each failure is its own rollout's only.

Most tests are of a stand-in for the package (`fake_verifiers.py`); the slow one installs the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import fake_verifiers
import pytest

import headrace
from headrace.commands.installed.doctor import taskset_findings
from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.types import Prompt
from headrace.durable.journal import read_steps
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.verifiers import taskset_process
from headrace.episodes.environments.verifiers.taskset_environment import open_taskset
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Played
from headrace.facts.facts import Evaluated, GroupEnded
from headrace.run.config import load_config
from support import tool_chats
from support.few import few
from support.gateway.written_turns import Model, check_rows, encoder_of
from support.tiny_run import of, tiny_config

TASKSET = """
import os, sys, time

TASKS = [{"prompt": f"task {i}", "answer": "so"} for i in range(10)]

async def play(task, ask, give, config):
    mode = getattr(task, "mode", "good")
    if mode == "raises":
        raise KeyError("no such thing")
    if mode == "exits":
        os._exit(7)
    if mode == "forks":
        if os.fork() == 0:
            return give("exact", 100.0)
        time.sleep(0.2)
    if mode == "hangs":
        time.sleep(10000)
    if mode == "silent":
        return give("exact", 1.0)
    said = await ask(task.prompt)
    print("printed by the taskset")
    if mode == "blocks":
        time.sleep(10000)
    if mode == "turns":
        for _ in range(config.agent.max_turns - 1):
            said = await ask("more")
    if mode == "insists":
        while True:
            await ask("more")
    if mode != "no reward":
        give("exact", float(said == task.answer), 2.0)
        give("short", float("nan") if mode == "nan" else -0.5)
"""


def played(
    place: Path,
    prompts: Sequence[Prompt],
    *,
    seeds: bool = False,
    model: Model | None = None,
    then: Prompt | None = None,
    **settings: Any,
) -> list[Played | Failure]:
    """Plays a rollout of each prompt, side by side in one process. `then`: one that is played behind them, until it succeeds."""
    if "python" not in settings and not (place / "python").exists():
        fake_verifiers.interpreter(place)
        (place / "letters.py").write_text(TASKSET)
    model = model or Model(encoder_of(place / "model", tool_chats.PLAIN), ["so<|im_end|>"] * 30)
    encoder = model.encoder
    known = {"max_turns": 3, "workers": 1, "python": str(place / "python"), "name": str(place / "letters.py")}
    config = EnvironmentConfig(kind="verifiers", **known | settings)

    async def main() -> list[Played | Failure]:
        log = place / "environment.log"
        kind = open_taskset(OpenedWith(config=config, encoder=encoder, log=log, seeds=seeds, held_out=4))
        try:
            each = [roll_out(kind, prompt, [0], ask=model, decode=encoder.decode) for prompt in prompts]
            found = [one for (one,) in await asyncio.gather(*each)]
            for _ in range(10 if then else 0):
                assert then
                (last,) = await roll_out(kind, then, [0], ask=model, decode=encoder.decode)
                if isinstance(last, Played):
                    return [*found, last]
            return found
        finally:
            await kind.close()

    return asyncio.run(main())


def test_a_renderer_turns_messages_into_tokens_in_the_process_of_the_taskset(tmp_path: Path) -> None:
    """Its tokens are the context of each turn, and the next one extends what was sampled."""
    options = {"options": {"renderer": {"name": "letters"}}}
    (one,) = played(tmp_path, [row(mode="turns", answer=str(tmp_path / "model"))], **options)
    assert isinstance(one, Played) and one.rewards["exact"] == 2.0, "the tokenizer is that of the run's model"
    said = [tuple(map(ord, text)) for text in ("say so", "more", "more")]
    assert [(turn.context, turn.parents) for turn in one.episode.turns] == [
        (said[0], ()),
        (said[1], (0,)),
        (said[2], (1,)),
    ]
    (refused,) = played(tmp_path, [row()], options={"renderer": {"name": "runes"}})
    assert isinstance(refused, Failure) and "no such renderer" in refused.detail


def row(**columns: Any) -> Prompt:
    return Prompt("train/3", "say so", (1,), columns={"answer": "so", **columns})


def seed(number: int) -> Prompt:
    return Prompt("p", f"seed {number}", (1,), columns={"seed": number})


def test_a_row_is_a_task_whose_rewards_come_back_with_their_weights(tmp_path: Path) -> None:
    (one,) = played(tmp_path, [row(mode="turns")])
    assert isinstance(one, Played) and one.rewards == {"exact": 2.0, "short": -0.5}
    assert [turn.parents for turn in one.episode.turns] == [(), (0,), (1,)], "as many turns as the run allows"
    assert one.episode.turns[0].messages[0]["content"] == "say so"
    assert "printed by the taskset" in (tmp_path / "environment.log").read_text()


def test_a_fork_of_a_taskset_answers_nothing(tmp_path: Path) -> None:
    (found,) = played(tmp_path, [row(mode="forks")])
    assert isinstance(found, Played) and found.rewards == {"exact": 2.0, "short": -0.5}


def test_a_seed_draws_a_task_and_the_last_tasks_are_held_out(tmp_path: Path) -> None:
    found = played(tmp_path, [seed(number) for number in range(24)], seeds=True)
    asked = [one.episode.turns[0].messages[0]["content"] for one in found if isinstance(one, Played)]
    assert asked[0::2] == [f"task {number % 6}" for number in range(12)]
    assert asked[1::2] == [f"task {6 + number % 4}" for number in range(12)]


def test_every_failure_is_that_of_its_own_rollout(tmp_path: Path) -> None:
    modes = ("good", "raises", "nan", "no reward", "silent", "insists")
    found = dict(zip(modes, played(tmp_path, [row(mode=mode) for mode in modes]), strict=True))
    assert isinstance(good := found.pop("good"), Played) and good.rewards == {"exact": 2.0, "short": -0.5}
    failures = {mode: one for mode, one in found.items() if isinstance(one, Failure)}
    assert {mode: failure.reason for mode, failure in failures.items()} == {
        "raises": "environment_raised",
        "nan": "environment_reward",
        "no reward": "environment_reward",
        "silent": "environment_turns",
        "insists": "environment_turns",
    }
    assert failures["raises"].detail == "TaskError: 'no such thing'" and failures["raises"].kind == "TaskError"
    assert "the reward short is nan" in failures["nan"].detail


EPISODE = """
TASKS = [{"prompt": f"task {i}"} for i in range(10)]

async def episode(task, run):
    agent, judge = run("agent"), run("judge")
    said = await agent.ask(task.prompt)
    await judge.ask(task.prompt)
    await agent.ask("again")
    again = run("agent")
    if task.mode != "silent":
        await again.ask(task.prompt)
    agent.give("right", 1.0, 2.0)
    judge.give("fair", float("nan") if task.mode == "untrained" else 0.5)
    again.give("right", -1.0)
    judge.agent.trainable = task.mode != "untrained"
"""


def episode_of(place: Path, mode: str, **settings: Any) -> Played | Failure:
    """Plays a rollout of an environment with two agents, one of which is run twice."""
    fake_verifiers.interpreter(place)
    (place / "letters.py").write_text(EPISODE)
    options = {"id": "judged", **settings.pop("options", {})}
    (one,) = played(place, [row(mode=mode)], options=options, max_turns=4, python=str(place / "python"), **settings)
    return one


def test_each_agent_of_an_environment_has_its_own_path_and_rewards(tmp_path: Path) -> None:
    """They are told apart by the model and the session of their requests, though all begin with the same words."""
    one = episode_of(tmp_path, "good")
    assert isinstance(one, Played), one
    assert [turn.agent for turn in one.episode.turns] == ["agent", "judge", "agent", "agent 2"]
    assert [turn.parents for turn in one.episode.turns] == [(), (), (0,), ()]
    assert one.turn_rewards == ({}, {"judge.fair": 0.5}, {"agent.right": 2.0}, {"agent 2.right": -1.0})
    assert one.rewards == {} and all(turn.trained for turn in one.episode.turns)


def test_an_agent_that_verifiers_does_not_train_is_not_trained(tmp_path: Path) -> None:
    """Nor are its rewards those of the rollout, whatever they are."""
    one = episode_of(tmp_path, "untrained")
    assert isinstance(one, Played), one
    assert [turn.trained for turn in one.episode.turns] == [True, False, True, True]
    assert one.turn_rewards == ({}, {}, {"agent.right": 2.0}, {"agent 2.right": -1.0})


def test_an_agent_with_a_model_of_its_own_is_not_asked_for(tmp_path: Path) -> None:
    """The only one that is left has the rewards of the rollout by their own names, and a number from its second run on."""
    one = episode_of(tmp_path, "good", options={"judge": {"client": {"base_url": "http://127.0.0.1:1/v1"}}})
    assert isinstance(one, Failure) and "Connection refused" in one.detail, "the judge's own model was asked"
    (tmp_path / "letters.py").write_text(EPISODE.replace("await judge.ask(task.prompt)", ""))
    options = {"id": "judged", "judge": {"client": {"base_url": "http://127.0.0.1:1/v1"}}}
    (one,) = played(tmp_path, [row(mode="good")], options=options, max_turns=4)
    assert isinstance(one, Played), one
    assert [turn.agent for turn in one.episode.turns] == ["", "", "agent 2"]
    assert one.turn_rewards == ({}, {"right": 2.0}, {"agent 2.right": -1.0})


def test_an_agent_without_a_turn_is_a_failure_and_one_that_was_cut_off_is_not(tmp_path: Path) -> None:
    one = episode_of(tmp_path, "silent")
    assert one == Failure("environment_turns", "an agent of its environment ended without asking for a turn")
    (one,) = played(tmp_path, [row(mode="good")], options={"id": "judged"}, max_turns=3)
    assert isinstance(one, Played) and one.episode.cut == "turns"
    assert one.turn_rewards == ({}, {"judge.fair": 0.5}, {"agent.right": 2.0}), "the second run had no turn"


def test_a_process_that_ends_is_replaced_and_its_rollouts_have_failed(tmp_path: Path) -> None:
    lost, other, again = played(tmp_path, [row(mode="exits"), row(mode="blocks")], then=row())
    for one in (lost, other):
        assert isinstance(one, Failure) and one.reason == "environment_died"
        assert "its process ended with exit code 7" in one.detail
    assert isinstance(again, Played)


def test_one_that_blocks_its_process_is_ended_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taskset_process, "GRACE", 1.0)
    blocked, again = played(tmp_path, [row(mode="hangs")], then=row(), seconds=4.0)
    assert isinstance(blocked, Failure) and blocked.reason == "environment_timeout"
    assert "took more than 4 s between its turns" in blocked.detail and isinstance(again, Played)


def test_a_process_ends_with_its_run_whatever_it_is_doing(tmp_path: Path) -> None:
    python = str(fake_verifiers.interpreter(tmp_path))
    (tmp_path / "letters.py").write_text(TASKSET)
    name = str(tmp_path / "letters.py")
    settings = {
        "name": name,
        "options": {},
        "max_turns": 3,
        "held_out": 0,
        "seeds": False,
        "memory": 0,
        "tokenizer": "",
    }
    order = {"play": 1, "url": "http://127.0.0.1:1", "row": {"prompt": "?", "mode": "hangs"}}
    words, pipe = taskset_process.player_words(python), subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["say"] == "opened"
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.close()
            assert process.wait(120)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("settings", "words"),
    few(
        starmap(
            pytest.param,
            [
                (
                    {"options": {"agent": {"harness": {"id": "bash"}}}},
                    "the harness bash of the agent agent executes what the",
                ),
                (
                    {
                        "options": {
                            "id": "judged",
                            **{one: {"client": {"base_url": "http://x"}} for one in ("agent", "judge")},
                        }
                    },
                    "all agents of the environment (agent, judge) have a model of their own, and none would be trained",
                ),
                ({"options": {"retries": {"max_retries": 1}}}, "retries would train a rollout that was given up"),
                ({"options": {"agent": {"retries": {"max_retries": 1}}}}, "retries would train"),
                ({"options": {"taskset": {"endless": True}}}, "is endless: set environment.options.select.limit"),
                ({"options": {"select": {"limit": 1}}}, "has one task, and none to hold out: set task.held_out = 0"),
                ({"options": {"taskset": {"level": 3}}}, "TasksetConfig.level: Extra inputs are not permitted"),
                ({"name": "no_such_taskset"}, "No module named 'no_such_taskset'"),
            ],
        ),
        keep=3,
    ),
)
def test_an_environment_that_cannot_be_trained_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    (found,) = played(tmp_path, [seed(2)], seeds=True, **settings)
    assert isinstance(found, Failure) and found.reason == "environment_died" and words in found.detail


def test_an_endless_taskset_may_be_cut(tmp_path: Path) -> None:
    options = {"taskset": {"endless": True}, "select": {"limit": 5}}
    (one,) = played(tmp_path, [seed(2 * 4)], seeds=True, options=options)
    assert isinstance(one, Played) and one.episode.turns[0].messages[0]["content"] == "task 1", (
        "two of five are held out"
    )


@pytest.mark.parametrize(("version", "words"), [("", "this interpreter .* has no"), ("0.3.2", "has verifiers 0.3.2")])
def test_an_interpreter_without_verifiers_is_refused_with_the_command(version: str, words: str, tmp_path: Path) -> None:
    python = str(fake_verifiers.interpreter(tmp_path, version)) if version else ""
    config = EnvironmentConfig(kind="verifiers", name="letters", python=python)
    encoder = encoder_of(tmp_path / "model", tool_chats.PLAIN)
    with pytest.raises(ConfigError, match=rf"{words}.*: install it \(.*pip install 'verifiers>=0.4,<0.5' uv"):
        open_taskset(OpenedWith(config=config, encoder=encoder, seeds=True))


def test_the_doctor_says_which_interpreter_has_it(tmp_path: Path) -> None:
    python = str(fake_verifiers.interpreter(tmp_path))
    (here,), (there,) = taskset_findings([sys.executable]), taskset_findings([sys.executable, python])
    assert (here.what, here.state, here.value) == ("verifiers", "note", f"no verifiers in {sys.executable}")
    assert "pip install 'verifiers>=0.4,<0.5' uv" in here.remedy
    assert (there.state, there.value, there.remedy) == ("ok", f"0.4.9 in {python}", "name it in environment.python")


MINIMAL = {"model": {"path": "m"}, "task": {"kind": "seeds"}}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"kind": "verifiers"}, 'environment.kind = "verifiers" needs environment.name'),
        (
            {"kind": "verifiers", "name": "a", "command": ["b"]},
            'environment.command belongs to environment.kind = "process"',
        ),
        (
            {"kind": "gym", "name": "a.py:B", "python": "p"},
            'environment.python belongs to environment.kind = "verifiers"',
        ),
        ({"kind": "gateway", "processes": 3}, 'environment.processes belongs to environment.kind = "process"'),
    ],
)
def test_settings_that_cannot_work_are_refused(environment: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**MINIMAL, "environment": environment})


def test_its_file_and_interpreter_are_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[task]\nkind = "seeds"\n[environment]\nkind = "verifiers"\nname = "sums.py"\npython = "v/bin/python"\n'
    )
    environment = load_config(tmp_path / "run.toml").environment
    assert environment.name == os.path.realpath(tmp_path / "sums.py")
    assert environment.python == os.path.realpath(tmp_path) + "/v/bin/python" and environment.rewards


LETTERS = """
TASKS = [{"prompt": f"Say {letter}", "answer": letter} for letter in "abcdefghijkl"]

async def play(task, ask, give, config):
    said = await ask(task.prompt)
    give("first", said.count(task.answer) / max(len(said), 1), 2.0)
    give("second", (await ask("more")).count("e") / 10)
"""


@pytest.mark.slow
def test_a_run_trains_on_a_taskset(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(LETTERS)
    environment = {
        "kind": "verifiers",
        "name": str(tmp_path / "letters.py"),
        "python": str(fake_verifiers.interpreter(tmp_path)),
        "max_turns": 2,
        "workers": 1,
    }
    config = tiny_config(
        tmp_path,
        tiny_llama,
        reward={"function": ""},
        environment=environment,
        engine={"context_length": 128},
        train={"steps": 2},
        eval={"prompts": 2, "samples": 1},
    )
    config["task"] = {"kind": "seeds", "held_out": 4}
    assert headrace.train(config).reason == "finished"
    directory = tmp_path / "runs" / "tiny"
    rollouts = [rollout for step in read_steps(directory) for group in step.groups for rollout in group.scored]
    asked = {rollout.episode.turns[0].messages[0]["content"] for rollout in rollouts}
    assert asked <= {f"Say {letter}" for letter in "abcdefgh"}, "the last four tasks are held out"
    for rollout in rollouts:
        assert len(rollout.episode.turns) == 2 and rollout.episode.turns[1].parents == (0,)
        assert rollout.rewards.keys() == {"first", "second"} and rollout.reward == sum(rollout.rewards.values())
    assert not any(fact.failures for fact in of(directory, GroupEnded))
    assert all(not fact.failures and fact.prompts == 2 for fact in of(directory, Evaluated))


ROLES = """
TASKS = [{"prompt": f"Say {letter}"} for letter in "abcdefghijkl"]

async def episode(task, run):
    asks, solves = run("agent"), run("judge")
    said = await asks.ask(task.prompt)
    answer = await solves.ask("Answer " + said)
    asks.give("drawn", sum(map(ord, said)) % 89 / 89)
    solves.give("drawn", sum(map(ord, answer)) % 97 / 97)
"""


@pytest.mark.slow
def test_a_run_credits_each_agent_of_an_environment(tiny_llama: Path, tmp_path: Path) -> None:
    """The advantages of a role are its own rewards less their mean over the group, each times one number."""
    (tmp_path / "letters.py").write_text(ROLES)
    config = tiny_config(
        tmp_path,
        tiny_llama,
        reward={"function": ""},
        environment={
            "kind": "verifiers",
            "name": str(tmp_path / "letters.py"),
            "python": str(fake_verifiers.interpreter(tmp_path)),
            "options": {"id": "judged"},
            "max_turns": 2,
            "workers": 1,
        },
        algo={"credit": "agent"},
        engine={"context_length": 192},
        train={"steps": 2},
        eval={"prompts": 0},
    )
    config["task"] = {"kind": "seeds", "held_out": 0}
    assert headrace.train(config).reason == "finished"
    groups = [group for step in read_steps(tmp_path / "runs" / "tiny") for group in step.groups]
    compared = 0
    for group in groups:
        assert [turn.agent for rollout in group.scored for turn in rollout.episode.turns] == ["agent", "judge"] * len(
            group.scored
        )
        for role, name in enumerate(("agent.drawn", "judge.drawn")):
            rewards = [rollout.rewards[name] for rollout in group.scored]
            mean = sum(rewards) / len(rewards)
            advantages = [row.advantages[row.mask.index(True)] for row in group.rows[role::2]]
            scales = [
                got / (given - mean)
                for got, given in zip(advantages, rewards, strict=True)
                if abs(given - mean) > 1e-9  # a reward that is the mean differs from it by rounding
            ]
            assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-3) if scales else not any(advantages)
            compared += bool(scales)
    assert compared > len(groups), "both roles had contrast in some group"


REAL = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.answer == "none":
            raise KeyError("no such thing")
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return -0.1 * trace.num_turns

class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(10):
            yield SumTask(SumData(prompt=f"What is {number} + 1?", answer=str(number + 1)), self.config.task)

class SumEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and said.last_reply != task.data.answer:
                said = await talk.turn("Are you sure?")

__all__ = ["SumEnv", "SumTaskset"]
"""


@pytest.fixture(scope="module")
def real_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of $HEADRACE_VERIFIERS_PYTHON, or one in which the package is installed."""
    place = tmp_path_factory.mktemp("verifiers")
    python = os.environ.get("HEADRACE_VERIFIERS_PYTHON") or str(place / "venv" / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "verifiers>=0.4,<0.5", "uv"], check=True)
    return python


@pytest.mark.slow
def test_the_real_package(real_python: str, tmp_path: Path) -> None:
    """Plays an environment of several turns with its own agent, which is a program."""
    (tmp_path / "sums_v1.py").write_text(REAL)
    settings = {"python": real_python, "name": str(tmp_path / "sums_v1.py"), "max_turns": 2}
    encoder = encoder_of(tmp_path / "model", tool_chats.PLAIN)
    model = Model(encoder, ["No.<|im_end|>", "3<|im_end|>"])
    (one,) = found = played(tmp_path, [seed(2 * 2)], seeds=True, model=model, **settings)
    assert isinstance(one, Played), found
    assert one.rewards == {"exact": 2.0, "short": pytest.approx(-0.2)}
    said = [(turn.parents, turn.messages[-1]["content"], turn.reply["content"]) for turn in one.episode.turns]
    assert said == [((), "What is 2 + 1?", "No."), ((0,), "Are you sure?", "3")]
    check_rows(one, model)
    wrong, raised = played(tmp_path, [row(), row(answer="none")], **settings)
    assert isinstance(wrong, Played) and wrong.rewards == {"exact": 2.0, "short": pytest.approx(-0.1)}
    assert isinstance(raised, Failure) and raised.reason == "environment_raised" and "no such thing" in raised.detail
    ends = json.dumps({"eos_token_id": encoder.encode_completion("", True)[0]})
    (tmp_path / "model" / "generation_config.json").write_text(ends)
    model = Model(encoder, ["No.<|im_end|>", "3<|im_end|>"])
    (one,) = found = played(
        tmp_path, [seed(2 * 2)], seeds=True, model=model, **settings | {"options": {"renderer": {"name": "default"}}}
    )
    assert isinstance(one, Played), found
    assert one.rewards == {"exact": 2.0, "short": pytest.approx(-0.2)}, "its train client, which sends tokens"
    (first, _), text = one.episode.turns, encoder.encode_messages([{"role": "user", "content": "What is 2 + 1?"}])
    assert encoder.written(first.context) == text[0], "what the model's own template writes"
    check_rows(one, model)
    (refused,) = played(tmp_path, [row()], **settings | {"options": {"agent": {"harness": {"id": "bash"}}}})
    assert isinstance(refused, Failure) and "executes what the model writes" in refused.detail


REAL_ROLES = """
import verifiers.v1 as vf
from sums_v1 import SumTaskset

class DuetConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()

class DuetEnv(vf.Env[DuetConfig]):
    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.critic.run(task)
        await agents.solver.run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            if trace.agent.name == "critic":
                trace.record_reward("fair", 0.25)

__all__ = ["DuetEnv", "SumTaskset"]
"""


@pytest.mark.slow
def test_several_agents_of_the_real_package(real_python: str, tmp_path: Path) -> None:
    """An environment with two agents, one of which is run twice, and two that verifiers ships: the same task several times, and a user that
    is the policy too and is not trained."""
    (tmp_path / "sums_v1.py").write_text(REAL)
    (tmp_path / "duet_v1.py").write_text(REAL_ROLES)
    encoder = encoder_of(tmp_path / "model", tool_chats.PLAIN)

    def roles(says: Sequence[str], taskset: str = "sums_v1.py", **options: Any) -> Played:
        model = Model(encoder, [f"{one}<|im_end|>" for one in says])
        settings = {"python": real_python, "name": str(tmp_path / taskset), "max_turns": 4, "options": options}
        (one,) = found = played(tmp_path, [seed(2 * 2)], seeds=True, model=model, **settings)
        assert isinstance(one, Played), found
        if all(turn.trained for turn in one.episode.turns):
            check_rows(one, model)
        return one

    duet = roles(["3", "no", "4"], "duet_v1.py")
    assert [turn.agent for turn in duet.episode.turns] == ["solver", "critic", "solver 2"]
    first, critic, second = duet.turn_rewards
    assert first == {"solver.exact": 2.0, "solver.short": pytest.approx(-0.1)}
    assert critic == {"critic.exact": 0.0, "critic.short": pytest.approx(-0.1), "critic.fair": 0.25}
    assert second["solver 2.exact"] == 0.0 and duet.rewards == {}
    best = roles(["3", "4"], id="best-of-n", n=2)
    assert [(turn.agent, turn.parents) for turn in best.episode.turns] == [("", ()), ("agent 2", ())]
    assert [given[name] for given, name in zip(best.turn_rewards, ("exact", "agent 2.exact"), strict=True)] == [2.0, 0]
    served = roles(["2 + 1, please", "3", "###DONE###"], id="user-sim")
    assert [(turn.agent, turn.trained) for turn in served.episode.turns] == [
        ("user", False),
        ("assistant", True),
        ("user", False),
    ]
    assert served.episode.turns[2].parents == (0,)
    assert {name for given in served.turn_rewards for name in given} == {"assistant.exact", "assistant.short"}
