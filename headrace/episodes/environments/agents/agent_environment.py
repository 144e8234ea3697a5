"""The environment that is a command of the user: one process for each rollout, which asks the gateway for its turns."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.core.errors import ConfigError, RolloutFailed
from headrace.core.protocols import Agent, Environment, EnvironmentKind
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.agent_process import (
    AgentProcess,
    GivenRewards,
    MemoryWatch,
    Reaper,
    agent_addresses,
    agent_variables,
    code_of,
    printed_reward,
)
from headrace.episodes.environments.agents.served_rollouts import ServedRollouts, give, given_of
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.history_trees import GatewayRollout
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.processes.joining.same_model import changed_code
from headrace.web.limits import ServerLimits


def open_agents(opened: OpenedWith) -> EnvironmentKind:
    """Makes the environments of `environment.command`. Raises ConfigError if there is no such command."""
    config = opened.config
    if shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"environment.command begins with {config.command[0]}, which is not a program that can be run here; install it, or write its "
            "whole path"
        )
    rollouts = ServedRollouts(opened, Gateway(opened.encoder, opened.stop, opened.sampling, ServerLimits()))
    agents = Agents(rollouts, alone=opened.alone, log=opened.log)
    return EnvironmentKind(
        agents.make, config.limits, resumes="restarted", close=agents.close, remarks=rollouts.gateway.remarks
    )


class Agents:
    """The gateway, the places and the settings that the rollouts of a run share."""

    def __init__(self, rollouts: ServedRollouts, *, alone: bool, log: Path | None) -> None:
        self.rollouts, self.config, self.alone, self.log = rollouts, rollouts.config, alone, log
        self.places = asyncio.Semaphore(self.config.processes)
        self.memory = int(self.config.memory_gib * (1 << 30))
        self.watch = MemoryWatch(self.memory)
        self.reaper = Reaper()
        self.code = code_of(self.config.command)
        """The files that the command names, and the packages that they import, as the first agent has them."""

    def make(self, prompt: Prompt, seed: int) -> Environment:
        return AgentEnvironment(prompt, seed, self)

    async def close(self) -> None:
        await self.rollouts.gateway.close()
        await self.watch.close()
        self.reaper.close()


class AgentEnvironment:
    """Protocol `Environment`."""

    def __init__(self, prompt: Prompt, seed: int, agents: Agents) -> None:
        self._prompt, self._seed, self._agents = prompt, seed, agents

    async def play(self, agent: Agent) -> Mapping[str, float]:
        async with self._agents.places, self._agents.rollouts.open(agent, self._prompt) as rollout:
            return give(agent, rollout, await self._played(rollout))

    async def _played(self, rollout: GatewayRollout) -> GivenRewards:
        agents = self._agents
        if problem := changed_code(agents.code):
            raise RolloutFailed("agent_exit", f"its process was not started: {problem}")
        url = agents.rollouts.gateway.url(rollout)
        try:
            process = await AgentProcess.start(
                agents.config.command,
                agent_variables(agent_addresses(url, rollout.secret)),
                given=msgspec.json.encode(given_of(self._prompt, self._seed)) + b"\n",
                directory=agents.config.directory,
                reaper=agents.reaper,
                memory=agents.memory,
            )
        except OSError as error:  # no memory, no descriptors, no directory
            raise RolloutFailed("agent_exit", f"its process could not be started: {error}") from None
        held: list[int] = []

        def hogged(count: int) -> None:
            held.append(count)
            process.kill()

        try:
            with agents.watch.watching(process.pid, hogged):
                code = await self._ended(process, rollout)
            if held:
                raise RolloutFailed("environment_memory", f"held {held[0] / (1 << 30):.1f} GiB{self._limit}")
            if code is None:
                return {}  # it has failed, and the session knows why
            return self._rewards(process, rollout, code)
        finally:
            await process.end(agents.log)

    async def _ended(self, process: AgentProcess, rollout: GatewayRollout) -> int | None:
        """Returns the exit code, or None if the rollout has failed before. Raises RolloutFailed when its seconds are used up."""
        exited, seconds = asyncio.ensure_future(process.wait()), self._agents.config.seconds
        try:
            return await rollout.until(exited, seconds, process.pid)
        except TimeoutError:
            message = f"took more than {seconds:g} s between its turns (environment.seconds)"
            raise RolloutFailed("environment_timeout", message) from None
        finally:
            exited.cancel()

    @property
    def _limit(self) -> str:
        return f"; environment.memory_gib = {self._agents.config.memory_gib:g} is the limit of one agent with all that it starts"

    def _rewards(self, process: AgentProcess, rollout: GatewayRollout, code: int) -> GivenRewards:
        refused = f"; the gateway refused it: {rollout.error}" if rollout.error else ""
        if code and process.traceback.rpartition("\n")[2].startswith("MemoryError"):
            raise RolloutFailed("environment_memory", f"found no more memory{self._limit}", process.traceback)
        if code:
            raise RolloutFailed("agent_exit", f"its process {process.how(code)}{refused}", process.traceback)
        if not rollout.answered:
            message = f"its process ended without asking for a turn at OPENAI_BASE_URL; it {process.how(code)}{refused}"
            raise RolloutFailed("environment_turns", message)
        return printed_reward(process.output) if self._agents.alone else {}
