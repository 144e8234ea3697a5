"""The environment that is a taskset of verifiers: its process plays the rollout, and asks the gateway for its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import ConfigError, RolloutFailed
from headrace.core.protocols import Agent, Environment, EnvironmentKind
from headrace.core.rewards import Unusable, number_of
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.served_rollouts import ServedRollouts, given_of
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.history_trees import GatewayRollout
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.verifiers.taskset_process import AgentRun, TasksetEnded, TasksetPool, TasksetProcess
from headrace.settings.extras import Found, interpreter, look_into
from headrace.web.limits import ServerLimits

# --- The interpreter that has `verifiers`: the one of `environment.python`.


SETTING = "environment.python"
MODULES = [["verifiers", "verifiers"]]
SERIES = "0.4."
"""The versions whose interface the player uses. 0.3 had another one."""
REMEDY = "python -m venv ~/verifiers && ~/verifiers/bin/pip install 'verifiers>=0.4,<0.5' uv"
"""uv installs the programs that most of its agents are."""


def look_for_verifiers(python: str) -> Found:
    """Raises ConfigError if the interpreter does not answer."""
    return look_into(python, MODULES, SETTING)


def lacking(found: Found) -> str:
    """Says, in words, why an interpreter cannot play tasksets; empty if it can."""
    if found.missing:
        return "no verifiers"
    return "" if found.version.startswith(SERIES) else f"verifiers {found.version or 'of an unknown version'}"


def require_verifiers(named: str) -> Found:
    """Returns what `environment.python` has. Raises ConfigError, with the command that installs it, if it is not verifiers 0.4."""
    found = look_for_verifiers(interpreter(named, SETTING))
    if lacks := lacking(found):
        where = f"{SETTING} = {found.python}" if named else f"this interpreter ({found.python})"
        raise ConfigError(
            f'environment.kind = "verifiers" needs verifiers {SERIES}*, and {where} has {lacks}: install it ({REMEDY}) and name its '
            "interpreter in environment.python"
        )
    return found


# --- taskset environment ------------------------------------------------------------


SESSION_HEADER = "X-Session-ID"
"""verifiers' clients send it with each request: an id for each time that an agent of the environment is run."""


def open_taskset(opened: OpenedWith) -> EnvironmentKind:
    """Makes the environments that a taskset plays. Seeds each draw a task of the taskset, of which the last `held_out` are kept for
    evaluation; a row is the data of its task. Raises ConfigError if the interpreter has no verifiers."""
    config = opened.config
    found = require_verifiers(config.python)
    settings = {
        "name": config.name,
        "options": dict(config.options),
        "max_turns": config.max_turns,
        "held_out": opened.held_out,
        "seeds": opened.seeds,
        "memory": int(config.memory_gib * (1 << 30)),
        "tokenizer": str(opened.encoder.directory),
    }
    gateway = Gateway(opened.encoder, opened.stop, opened.sampling, ServerLimits(), session_header=SESSION_HEADER)
    players = TasksetPool(found.python, settings, config.workers, opened.log)
    tasksets = Tasksets(ServedRollouts(opened, gateway), players, seeds=opened.seeds, alone=opened.alone)
    return EnvironmentKind(
        tasksets.make, config.limits, resumes="restarted", close=tasksets.close, remarks=gateway.remarks
    )


class Tasksets:
    """The gateway, the processes and the settings that the rollouts of a run share."""

    def __init__(self, rollouts: ServedRollouts, players: TasksetPool, *, seeds: bool, alone: bool) -> None:
        self.rollouts, self.players, self.seeds, self.alone = rollouts, players, seeds, alone
        self.places = asyncio.Semaphore(rollouts.config.processes)

    def make(self, prompt: Prompt, seed: int) -> Environment:
        return TasksetEnvironment(prompt, seed, self)

    async def close(self) -> None:
        await self.players.close()
        await self.rollouts.gateway.close()


class TasksetEnvironment:
    """Protocol `Environment`."""

    def __init__(self, prompt: Prompt, seed: int, tasksets: Tasksets) -> None:
        self._prompt, self._seed, self._tasksets = prompt, seed, tasksets

    async def play(self, agent: Agent) -> Mapping[str, float]:
        async with self._tasksets.places, self._tasksets.rollouts.open(agent, self._prompt) as rollout:
            process = await self._tasksets.players.least_busy()
            id, ended = process.play(self._asked(rollout))
            try:
                return self._rewards(await self._until(ended, rollout, process), rollout, agent)
            finally:
                process.part(id)

    def _asked(self, rollout: GatewayRollout) -> Mapping[str, Any]:
        given = given_of(self._prompt, self._seed)
        task = (
            {"seed": given["columns"]["seed"]}
            if self._tasksets.seeds
            else {"row": {**given["columns"], "prompt": given["prompt"]}}
        )
        return {"url": f"{self._tasksets.rollouts.gateway.url(rollout)}/v1", **task}

    async def _until(
        self, ended: asyncio.Future[TasksetEnded], rollout: GatewayRollout, process: TasksetProcess
    ) -> TasksetEnded | None:
        seconds = self._tasksets.rollouts.config.seconds
        try:
            return await rollout.until(ended, seconds, process.pid)
        except TimeoutError:
            message = f"took more than {seconds:g} s between its turns (environment.seconds)"
            raise RolloutFailed("environment_timeout", message) from None

    def _rewards(self, end: TasksetEnded | None, rollout: GatewayRollout, agent: Agent) -> Mapping[str, float]:
        if end is None:
            return {}  # it has failed, and the session knows why
        if end.failed:
            refused = f"; the gateway refused it: {rollout.error}" if rollout.error else ""
            raise RolloutFailed(end.reason, f"{end.failed}{refused}", end.traceback)
        if self._tasksets.alone and not any(run.rewards for run in end.runs):
            raise RolloutFailed("environment_reward", "the taskset gave no reward, and there is no reward function")
        return _given(end.runs, rollout, agent)


def _given(runs: Sequence[AgentRun], rollout: GatewayRollout, agent: Agent) -> Mapping[str, float]:
    """Gives each agent its rewards, as those of its last turn, and leaves agents that are not trained out of the loss. Returns the rewards of
    the rollout: those of its only agent. An agent that was cut off before its first turn has none."""
    for run in runs:
        rewards = {name: _number(name, value) for name, value in run.rewards.items()}
        speaker = rollout.speaker_in(run.session)
        if not run.trained:
            if speaker:
                agent.leave_out(speaker.name)
            continue
        if speaker is None:
            raise RolloutFailed("environment_turns", "an agent of its environment ended without asking for a turn")
        if len(runs) == 1 and not speaker.name:
            return rewards
        for name, value in rewards.items() if speaker.last else ():
            agent.reward(f"{speaker.name}.{name}" if speaker.name else name, value, speaker.last)
    return {}


def _number(name: str, sent: float | str) -> float:
    """Raises RolloutFailed for what is not a number that training can calculate with."""
    value = float(sent) if sent in ("nan", "inf", "-inf") else sent
    if isinstance(number := number_of(value), Unusable):
        raise RolloutFailed("environment_reward", f"the reward {name} {number.said}")
    return number
