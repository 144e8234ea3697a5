"""The environment kind `atropos`: a rollout of a ticket waits until an environment of Atropos has played and scored it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.errors import RolloutFailed
from headrace.core.protocols import Agent, Environment, EnvironmentKind
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.served_rollouts import AddressFile, ServedRollouts
from headrace.episodes.environments.atropos.atropos_routes import InferenceRoutes, TrainerFacts, TrajectoryRoutes
from headrace.episodes.environments.atropos.open_rollouts import OpenRollout, OpenRollouts
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.history_trees import SECRET_BYTES
from headrace.episodes.environments.gateway.turn_request import GatewayEncoder, OpenedWith
from headrace.episodes.environments.kinds import ADDRESS_FILE
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.server import bind

NAME = "score"
"""The name of the reward that is an environment's score."""

Answer = Callable[[HttpRequest], Awaitable[Response]]


def open_atropos(opened: OpenedWith) -> EnvironmentKind:
    """Makes the environments that environments of Atropos play. Raises ConfigError if the port cannot be had."""
    config = opened.config
    assert opened.log, "the address is written beside the log"
    facts = TrainerFacts(opened.name, opened.steps, opened.group_size, opened.groups_per_step, opened.longest)
    sock = bind(config.host, config.port, "environment.")
    rollouts = ServedRollouts(opened, Gateway(opened.encoder, opened.stop, opened.sampling, ServerLimits(), sock))
    atropos = Atropos(rollouts, facts, opened.encoder, alone=opened.alone, log=opened.log)
    message = "environments of Atropos, which find the run at the address that headrace gateway shows"
    remarks = rollouts.gateway.remarks
    return EnvironmentKind(
        atropos.make, config.limits, resumes="restarted", close=atropos.close, remarks=remarks, players=message
    )


class Atropos:
    """The gateway and the open rollouts of a run."""

    def __init__(
        self, rollouts: ServedRollouts, facts: TrainerFacts, encoder: GatewayEncoder, *, alone: bool, log: Path
    ) -> None:
        """`alone`: whether the environments' scores are the only rewards."""
        self.rollouts, self.alone, self._log = rollouts, alone, log
        self.open = OpenRollouts(facts.group_size)
        self._address, self._secret = AddressFile(log.parent / ADDRESS_FILE), secrets.token_urlsafe(SECRET_BYTES)
        trajectories = TrajectoryRoutes(facts, self.open, encoder.written, encoder.decode, self._said)
        inference = InferenceRoutes(self.open, rollouts.gateway)
        self._routes: Mapping[tuple[str, str], Answer] = {
            ("GET", ""): trajectories.root,
            ("GET", "info"): trajectories.info,
            ("GET", "wandb_info"): trajectories.wandb_info,
            ("GET", "status"): trajectories.status,
            ("GET", "status-env"): trajectories.status_env,
            ("POST", "register-env"): trajectories.register_env,
            ("POST", "disconnect-env"): trajectories.disconnect_env,
            ("POST", "scored_data"): trajectories.scored_data,
            ("POST", "scored_data_list"): trajectories.scored_data_list,
            ("GET", "health"): inference.health,
            ("GET", "v1/models"): inference.models,
            ("POST", "generate"): inference.generate,
            ("POST", "v1/chat/completions"): inference.chat,
            ("POST", "v1/completions"): inference.completions,
        }
        rollouts.gateway.doors[self._secret] = self._answer

    def make(self, prompt: Prompt, seed: int) -> Environment:
        return AtroposEnvironment(prompt, self)

    def publish(self) -> None:
        """Writes the address, once the server has one."""
        self._address.publish(f"{self.rollouts.gateway.address}/{self._secret}")

    async def close(self) -> None:
        self._address.remove()
        await self.open.close()
        await self.rollouts.gateway.close()

    async def _answer(self, request: HttpRequest, path: str) -> Response:
        if answer := self._routes.get((request.method, path.rstrip("/"))):
            return await answer(request)
        known = ", ".join(f"{method} /{path_}" for method, path_ in self._routes)
        raise Refused(404, f"{request.method} /{path} is not served here; there are: {known}")

    def _said(self, line: str) -> None:
        with self._log.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{line}\n")


class AtroposEnvironment:
    """Protocol `Environment`."""

    def __init__(self, prompt: Prompt, atropos: Atropos) -> None:
        self._prompt, self._atropos = prompt, atropos

    async def play(self, agent: Agent) -> Mapping[str, float]:
        atropos = self._atropos
        async with atropos.rollouts.open(agent, self._prompt) as served:
            with atropos.open.offered(served, self._prompt.id) as rollout:
                atropos.publish()
                taken = asyncio.ensure_future(rollout.taken.wait())
                try:
                    awaited: set[asyncio.Future[Any]] = {taken, rollout.ended}
                    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    taken.cancel()
                score = await self._scored(rollout)
        return {NAME: score} if atropos.alone and score is not None else {}

    async def _scored(self, rollout: OpenRollout) -> float | None:
        """Returns the score; None if the rollout has failed, and the session knows why."""
        seconds, served = self._atropos.rollouts.config.seconds, rollout.served
        try:
            return await served.until(rollout.ended, seconds, os.getpid())
        except TimeoutError:
            message = (
                f"no environment has posted its group within {seconds:g} s after its last turn (environment.seconds)"
            )
            refused = f"; it was refused: {served.error}" if served.error else ""
            hint = "; groups with equal scores are posted with --env.ensure_scores_are_not_same false only"
            raise RolloutFailed(
                "not_posted", f"{message}; turns that it had: {served.answered}{refused}{hint}"
            ) from None
