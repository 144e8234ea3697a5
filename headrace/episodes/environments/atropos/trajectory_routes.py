"""The trajectory API of Atropos, as environments use it: they register, ask how far training is, and post scored groups.

The routes for trainers (`/register`, `/batch`) are not served: this run is the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.episodes.environments.atropos.open_rollouts import OpenRollouts
from headrace.episodes.environments.atropos.posted_groups import GroupFound, Sequences, Written
from headrace.episodes.environments.atropos.trainer_facts import TrainerFacts
from headrace.episodes.environments.atropos.trajectory_bodies import (
    EnvNumber,
    EnvRegistration,
    PostedGroup,
    read_posted,
)
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.sending import json_response

LEAST_WEIGHT = 0.01
"""The smallest share of the inference that an environment is given, as in atroposlib."""


@dataclass(kw_only=True)
class _Env:
    given: EnvRegistration
    name: str
    connected: bool = True

    @property
    def share(self) -> float:
        return self.given.max_token_length * max(0.0, self.given.weight) if self.connected else 0.0


class TrajectoryRoutes:
    def __init__(
        self,
        facts: TrainerFacts,
        rollouts: OpenRollouts,
        written: Written,
        decode: Written,
        said: Callable[[str], None],
    ) -> None:
        """`said`: receives a line for each group of which something was refused."""
        self._facts, self._rollouts, self._written, self._decode, self._said = facts, rollouts, written, decode, said
        self._limits = ServerLimits()
        self._envs: list[_Env] = []

    async def root(self, request: HttpRequest) -> Response:
        return json_response({"message": "headrace, trajectory API of Atropos"})

    async def info(self, request: HttpRequest) -> Response:
        # Environments leave out groups with a sequence of max_token_len tokens or more.
        return json_response({"batch_size": self._facts.batch_size, "max_token_len": self._facts.longest + 1})

    async def wandb_info(self, request: HttpRequest) -> Response:
        return json_response({"group": self._facts.name, "project": "headrace"})

    async def status(self, request: HttpRequest) -> Response:
        return json_response({"current_step": self._step(), "queue_size": 0})

    async def register_env(self, request: HttpRequest) -> Response:
        env = await read_posted(request, EnvRegistration, self._limits)
        name = f"{env.desired_name}_{sum(one.given.desired_name == env.desired_name for one in self._envs)}"
        if env.group_size != self._facts.group_size:
            said = (
                f"the environment {name} has groups of {env.group_size}, and the run has rollout.group_size = "
                f"{self._facts.group_size}: set --env.group_size {self._facts.group_size}"
            )
            self._said(said)
            return json_response({"status": said})  # it prints that, and asks again
        self._envs.append(_Env(given=env, name=name))
        self._said(f"the environment {name} has registered")
        return json_response(
            {
                "status": "success",
                "env_id": len(self._envs) - 1,
                "wandb_name": name,
                "checkpoint_dir": "",
                "starting_step": self._step(),
                "checkpoint_interval": -1,
                "num_steps": self._facts.steps,
            }
        )

    async def disconnect_env(self, request: HttpRequest) -> Response:
        env = await self._env(request)
        if env:
            env.connected = False
        return json_response({"status": "success" if env else "failure"})

    async def status_env(self, request: HttpRequest) -> Response:
        env = await self._env(request)
        total = sum(one.share for one in self._envs)
        return json_response(
            {
                "current_step": self._step(),
                "queue_size": 0,  # requests for tokens wait while no ticket is free, so nothing queues
                "self_queue_size": 0,
                "max_group_size": self._facts.group_size,
                "unallocated_fraction": 1.0,
                "env_weight": max(LEAST_WEIGHT, env.share / total) if env and total else 1.0,
            }
        )

    async def scored_data(self, request: HttpRequest) -> Response:
        return self._scored([await read_posted(request, PostedGroup, self._limits)])

    async def scored_data_list(self, request: HttpRequest) -> Response:
        return self._scored(await read_posted(request, list[PostedGroup], self._limits))

    async def _env(self, request: HttpRequest) -> _Env | None:
        """The environment of the request; None if it has registered with an earlier process of the run."""
        number = (await read_posted(request, EnvNumber, self._limits)).env_id
        return self._envs[number] if 0 <= number < len(self._envs) else None

    def _scored(self, groups: list[PostedGroup]) -> Response:
        total = GroupFound(0, 0, 0)
        for group in groups:
            problem = group.problem()
            sequences = Sequences(self._rollouts.playing(), self._written, self._decode)
            found = sequences.refuse(group, problem) if problem else sequences.score(group)
            if problem or found.unknown:
                self._said(f"a posted group was refused: {problem or _unknown(found, len(group.tokens))}")
            total = GroupFound(*(one + other for one, other in zip(total, found, strict=True)))
        answer = {"groups_processed": len(groups), **total._asdict()}
        if not total.scored:
            raise Refused(
                422, f"nothing of the group can be trained: {json.dumps(answer)}; logs/environment.log says why"
            )
        return json_response({"status": "received", **answer})

    def _step(self) -> int:
        return self._rollouts.newest


def _unknown(found: GroupFound, count: int) -> str:
    return (
        f"{found.unknown} of its {count} sequences are of unknown age: they were not sampled from this run, or for rollouts that are over. "
        "Point --openai.base_url at this run, and post the sequences as they were sampled"
    )
