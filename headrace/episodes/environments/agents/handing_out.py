"""`environment.kind = "gateway"`: rollouts are handed out to agents that nobody here starts.

An agent, or whoever calls it, takes a rollout (`POST ADDRESS/next`), plays it at the address that it is given, and ends it (`POST` to the
`end` of the answer). The address has a secret, which `headrace gateway RUN` shows; each rollout has one, and its end another one: the policy
may read the environment variables of its agent, and must not be able to give itself a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.errors import RolloutFailed
from headrace.core.protocols import Agent, Environment, EnvironmentKind
from headrace.core.rewards import Unusable, named_twice, number_of
from headrace.core.types import Prompt
from headrace.episodes.environments.agents.agent_process import NAME, GivenRewards, agent_addresses
from headrace.episodes.environments.agents.served_rollouts import (
    AddressFile,
    ServedRollouts,
    give,
    given_of,
)
from headrace.episodes.environments.gateway.gateway import Gateway
from headrace.episodes.environments.gateway.history_trees import SECRET_BYTES, GatewayRollout
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.kinds import ADDRESS_FILE
from headrace.web.bodies import Body
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.sending import GONE, decoded, json_response, read_body, read_bytes, while_there
from headrace.web.server import bind

WAIT = 30.0
"""Seconds for which a request for a rollout waits for one, unless it names others."""


class RolloutWanted(Body, kw_only=True):
    """A request for a rollout."""

    wait: Annotated[float, Meta(ge=0, le=300)] = WAIT


class RolloutEnd(Body, kw_only=True):
    """The end of a rollout: with a reward, with rewards by name, or with the reason why there is none."""

    reward: float | None = None
    rewards: dict[str, float | dict[str, float]] | None = None
    """Rewards by name; an object has those of the role that it is named after."""
    failed: str | None = None


@dataclass(eq=False, kw_only=True)
class Offer:
    """A rollout that an agent may take."""

    rollout: GatewayRollout
    given: Mapping[str, Any]
    secret: str = field(default_factory=partial(secrets.token_urlsafe, SECRET_BYTES))
    """Names its end."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[GivenRewards] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    withdrawn: bool = False
    """Whether it is over, so that nobody may take it."""


def open_handing_out(opened: OpenedWith) -> EnvironmentKind:
    """Makes the environments that agents elsewhere play. Raises ConfigError if the port cannot be had."""
    config = opened.config
    assert opened.log, "the address is written beside the log"
    sock = bind(config.host, config.port, "environment.")
    rollouts = ServedRollouts(opened, Gateway(opened.encoder, opened.stop, opened.sampling, ServerLimits(), sock))
    desk = Desk(rollouts, opened.alone, opened.log.parent / ADDRESS_FILE)
    message = "agents, which take rollouts at the address that headrace gateway shows"
    remarks = rollouts.gateway.remarks
    return EnvironmentKind(
        desk.make, config.limits, resumes="restarted", close=desk.close, remarks=remarks, players=message
    )


class Desk:
    """Hands out rollouts and takes back their rewards."""

    def __init__(self, rollouts: ServedRollouts, alone: bool, address: Path) -> None:
        """`alone`: whether nothing else gives rewards. `address`: the file that gets the address."""
        self.rollouts, self._alone, self._address = rollouts, alone, AddressFile(address)
        self._secret = secrets.token_urlsafe(SECRET_BYTES)
        self._offers: asyncio.Queue[Offer] = asyncio.Queue()
        rollouts.gateway.doors[self._secret] = self._next

    def make(self, prompt: Prompt, seed: int) -> Environment:
        return HandedOut(prompt, seed, self)

    def offer(self, rollout: GatewayRollout, prompt: Prompt, seed: int) -> Offer:
        offer = Offer(rollout=rollout, given={"id": prompt.id, **given_of(prompt, seed)})
        self.rollouts.gateway.doors[offer.secret] = partial(self._end, offer)
        self._address.publish(f"{self.rollouts.gateway.address}/{self._secret}")
        self._offers.put_nowait(offer)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """Lets nobody take or end a rollout that is over."""
        offer.withdrawn = True
        self.rollouts.gateway.doors.pop(offer.secret, None)

    async def close(self) -> None:
        self._address.remove()
        await self.rollouts.gateway.close()

    # -- requests -----------------------------------------------------------------------------------------------------------

    async def _next(self, request: HttpRequest, path: str) -> Response:
        _check_route(request, path, "next")
        wanted = await read_body(request, RolloutWanted, self.rollouts.gateway.limits)
        found = await while_there(request, self._take(wanted.wait))
        if found is None:
            return GONE
        if not found:
            return Response(status_code=204)
        (offer,) = found
        base = str(request.base_url).rstrip("/")  # as this client reaches us
        return json_response(
            {
                **offer.given,
                "environment": agent_addresses(f"{base}/{offer.rollout.secret}", offer.rollout.secret),
                "end": f"{base}/{offer.secret}/end",
                "judged": not self._alone,
                "seconds": self.rollouts.config.seconds,
            }
        )

    async def _take(self, wait: float) -> Sequence[Offer]:
        """Returns the rollout that has waited longest; none if there was none for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while (offer := await self._offers.get()).withdrawn:
                    pass
                offer.taken.set()
                return (offer,)
        return ()

    async def _end(self, offer: Offer, request: HttpRequest, path: str) -> Response:
        _check_route(request, path, "end")
        body = await read_bytes(request, "application/json", self.rollouts.gateway.limits)
        end = decoded(body, RolloutEnd)
        if twice := named_twice(body):
            raise Refused(400, f"{twice} is given twice; send one of them")
        rewards = self._rewards(end)
        if offer.ended.done():
            raise Refused(409, "the rollout has ended already")
        if offer.withdrawn:  # while the body was on its way
            raise Refused(409, "the rollout is over: it took too long, or has failed")
        if end.failed is not None:
            offer.ended.set_exception(RolloutFailed("agent_failed", end.failed[:1000] or "its agent gave no reason"))
        else:
            offer.ended.set_result(rewards)
        return json_response({"ended": True})

    def _rewards(self, end: RolloutEnd) -> GivenRewards:
        """Raises Refused for an end with two meanings, or without the reward that is needed."""
        given = [name for name in ("reward", "rewards", "failed") if getattr(end, name) is not None]
        if len(given) > 1:
            raise Refused(400, f"{' and '.join(given)} are both given; send one of them")
        if end.failed is not None:
            return {}
        if given and not self._alone:
            raise Refused(400, f"{given[0]} is given, and reward.function of the run gives the reward; send {{}}")
        rewards: GivenRewards = end.rewards or ({} if end.reward is None else {NAME: end.reward})
        flat = list(_flat(rewards))
        if self._alone and not flat:
            raise Refused(400, "no reward is given; send reward, rewards by name, or failed with the reason")
        times = Counter(name for name, _ in flat)
        for name, value in flat:
            if times[name] > 1:
                raise Refused(
                    400, f"the reward {name} is given twice, by itself and as one of a role; give one another name"
                )
            if isinstance(number := number_of(value), Unusable):
                raise Refused(400, f"the reward {name} {number.said}")
        return rewards


def _check_route(request: HttpRequest, path: str, name: str) -> None:
    """Raises Refused for another path than this one, or another method than POST."""
    if path != name:
        raise Refused(404, f"/{path} is not served here; there is: /{name}")
    if request.method != "POST":
        raise Refused(405, f"/{name} takes POST", headers={"Allow": "POST"})


def _flat(rewards: GivenRewards) -> Iterator[tuple[str, float]]:
    """Yields all rewards, those of a role under its name."""
    for name, given in rewards.items():
        if isinstance(given, Mapping):
            yield from ((f"{name}.{key}", value) for key, value in given.items())
        else:
            yield name, given


class HandedOut:
    """Protocol `Environment`."""

    def __init__(self, prompt: Prompt, seed: int, desk: Desk) -> None:
        self._prompt, self._seed, self._desk = prompt, seed, desk

    async def play(self, agent: Agent) -> Mapping[str, float]:
        async with self._desk.rollouts.open(agent, self._prompt) as rollout:
            offer = self._desk.offer(rollout, self._prompt, self._seed)
            try:
                await offer.taken.wait()
                return give(agent, rollout, await self._played(offer))
            finally:
                self._desk.withdraw(offer)

    async def _played(self, offer: Offer) -> GivenRewards:
        seconds, rollout = self._desk.rollouts.config.seconds, offer.rollout
        try:
            rewards = await rollout.until(offer.ended, seconds, os.getpid())
        except TimeoutError:
            message = (
                f"the agent that took it has not ended it after {seconds:g} s between its turns (environment.seconds)"
            )
            refused = f"; the gateway refused it: {rollout.error}" if rollout.error else ""
            raise RolloutFailed(
                "environment_timeout", f"{message}; turns that it had: {rollout.answered}{refused}"
            ) from None
        return rewards or {}  # none: it has failed, and the session knows why
