"""The environment that is a command of the user: one process for each rollout, which asks the gateway for its turns."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.agents.agent_process import AgentProcess, Reaper, agent_variables
from headrace.environments.agents.printed_reward import printed_reward
from headrace.environments.config import EnvironmentConfig
from headrace.environments.conversation import Conversation, TurnEncoder
from headrace.environments.gateway.chat_tree import ChatTree
from headrace.environments.gateway.gateway import Gateway
from headrace.environments.gateway.gateway_rollout import GatewayRollout
from headrace.errors import ConfigError, RolloutFailed
from headrace.observe.health.patience import within
from headrace.playing import Agent, Environment, EnvironmentKind
from headrace.types import Prompt
from headrace.web.limits import ServerLimits


def open_agents(
    config: EnvironmentConfig,
    encoder: TurnEncoder,
    *,
    system: str,
    sampling: Mapping[str, object],
    stop: Sequence[str],
    alone: bool,
    log: Path | None,
) -> EnvironmentKind:
    """Makes the environments of `environment.command`. `system`: the system message of conversations that have none; `sampling`: the
    run's temperature, top_p, top_k and min_p; `stop`: its stop strings; `alone`: whether nothing else gives rewards; `log` receives what
    the agents write to standard error. Raises ConfigError if there is no such command."""
    if shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"environment.command begins with {config.command[0]}, which is no program that can be run here; install it, or write its "
            "whole path"
        )
    gateway = Gateway(encoder.written, stop, sampling, ServerLimits())
    agents = Agents(config, encoder, gateway, system=system, alone=alone, log=log)
    return EnvironmentKind(agents.make, config.limits, resumes="restarted", close=agents.close, remarks=gateway.remarks)


class Agents:
    """The gateway, the places and the settings that the rollouts of a run share."""

    def __init__(
        self,
        config: EnvironmentConfig,
        encoder: TurnEncoder,
        gateway: Gateway,
        *,
        system: str,
        alone: bool,
        log: Path | None,
    ) -> None:
        self.config, self.gateway, self.alone, self.log = config, gateway, alone, log
        self.places = asyncio.Semaphore(config.processes)
        self.reaper = Reaper()
        self._encoder, self._system = encoder, system

    def make(self, prompt: Prompt, seed: int) -> Environment:
        return AgentEnvironment(prompt, seed, self)

    def tree(self, agent: Agent) -> ChatTree:
        config = self.config
        return ChatTree(partial(Conversation, agent, self._encoder, system=self._system, tools=config.tools))

    async def close(self) -> None:
        await self.gateway.close()
        self.reaper.close()


class AgentEnvironment:
    """Protocol `Environment`."""

    def __init__(self, prompt: Prompt, seed: int, agents: Agents) -> None:
        self._prompt, self._seed, self._agents = prompt, seed, agents

    async def play(self, agent: Agent) -> Mapping[str, float]:
        async with self._agents.places:
            gateway = self._agents.gateway
            rollout = await gateway.open(self._agents.tree(agent))
            try:
                return await self._played(rollout)
            finally:
                await gateway.shut(rollout)

    async def _played(self, rollout: GatewayRollout) -> Mapping[str, float]:
        agents = self._agents
        try:
            process = await AgentProcess.start(
                agents.config.command,
                agent_variables(agents.gateway.url(rollout), rollout.secret),
                given=self._given(),
                directory=agents.config.directory,
                reaper=agents.reaper,
            )
        except OSError as error:  # no memory, no descriptors, no directory
            raise RolloutFailed("agent_exit", f"its process could not be started: {error}") from None
        try:
            code = await self._ended(process, rollout)
            if code is None:
                return {}  # it has failed, and the session knows why
            return self._rewards(process, rollout, code)
        finally:
            await process.end(agents.log)

    def _given(self) -> bytes:
        """The standard input of an agent."""
        columns = dict(self._prompt.columns)
        asked: Any = columns.pop(self._prompt.chat) if self._prompt.chat else self._prompt.text
        return msgspec.json.encode({"prompt": asked, "columns": columns, "seed": self._seed}) + b"\n"

    async def _ended(self, process: AgentProcess, rollout: GatewayRollout) -> int | None:
        """Returns the exit code, or None if the rollout has failed before. Sampling does not count towards its seconds. Raises
        RolloutFailed when they are used up."""
        exited = asyncio.ensure_future(process.wait())
        over = asyncio.ensure_future(rollout.over.wait())
        left, clock = self._agents.config.seconds, asyncio.get_running_loop().time
        try:
            while not (exited.done() or over.done()):
                rollout.changed.clear()
                since, asking = clock(), rollout.asking > 0
                changed = asyncio.ensure_future(rollout.changed.wait())
                first = asyncio.wait({exited, over, changed}, return_when=asyncio.FIRST_COMPLETED)
                try:
                    await (first if asking or not left else within(process.pid, left, first))
                finally:
                    changed.cancel()
                if left and not asking:
                    left = max(left - (clock() - since), 1e-3)
            if rollout.broken:
                raise rollout.broken
            return exited.result() if exited.done() else None
        except TimeoutError:
            said = f"took more than {self._agents.config.seconds:g} s between its turns (environment.seconds)"
            raise RolloutFailed("environment_timeout", said) from None
        finally:
            over.cancel()
            exited.cancel()

    def _rewards(self, process: AgentProcess, rollout: GatewayRollout, code: int) -> Mapping[str, float]:
        refused = f"; the gateway refused it: {rollout.error}" if rollout.error else ""
        if code:
            raise RolloutFailed("agent_exit", f"its process {process.how(code)}{refused}", process.traceback)
        if not rollout.answered:
            said = f"its process ended without asking for a turn at OPENAI_BASE_URL; it {process.how(code)}{refused}"
            raise RolloutFailed("environment_turns", said)
        return printed_reward(process.output) if self._agents.alone else {}
