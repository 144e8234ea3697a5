"""The rollouts that environments of Atropos may play, and which of them a request belongs to.

Nothing in a request names a rollout. A request that continues the tokens of a rollout is its next turn. Any other begins a rollout: in the
ticket whose first request was the same, as long as that has rollouts left, or in the ticket that has waited longest. While there is none,
the request waits. So a ticket is drawn before its prompt is sampled (C1), and the run paces its environments.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from headrace.core.errors import RolloutFailed
from headrace.episodes.environments.gateway.chat_tree import TreeReply
from headrace.episodes.environments.gateway.gateway_rollout import GatewayRollout
from headrace.web.errors import Refused


def digest_of(tokens: Sequence[int]) -> bytes:
    return blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


def _unfinished() -> asyncio.Future[float]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, kw_only=True)
class OpenRollout:
    """A rollout that an environment may play."""

    served: GatewayRollout
    ticket: OpenTicket
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[float] = field(default_factory=_unfinished)
    """Its score."""
    busy: bool = False
    """Whether a later turn of it is being sampled."""
    tokens: tuple[int, ...] = ()
    """All tokens up to the end of the last turn."""
    sampled: list[range] = field(default_factory=list)
    """The places of the completions among them."""
    digest: bytes = b""

    @property
    def playing(self) -> bool:
        return self.taken.is_set() and not self.ended.done()

    def extended(self, turn: TreeReply) -> None:
        """Takes note of a turn."""
        if turn.completion is None:
            return
        assert turn.path is not None, "a completion ends a path"
        tokens = turn.path.tokens()
        if self.tokens != tokens[: len(self.tokens)]:  # the template has rewritten history: a path of its own
            self.sampled.clear()
        self.tokens, self.digest = tokens, digest_of(tokens)
        self.sampled.append(range(len(tokens) - len(turn.completion.tokens), len(tokens)))

    def score(self, score: float) -> None:
        if not self.ended.done():
            self.ended.set_result(score)

    def fail(self, reason: str, detail: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RolloutFailed(reason, detail))
            self.ended.exception()  # whoever plays it may have left already


@dataclass(eq=False)
class OpenTicket:
    """The rollouts of one ticket."""

    prompt_id: str
    first: bytes = b""
    """The digest of the request that began it; empty if none has."""
    rollouts: list[OpenRollout] = field(default_factory=list)

    def free(self) -> list[OpenRollout]:
        return [one for one in self.rollouts if not one.taken.is_set() and not one.ended.done()]


class _Wanted(NamedTuple):
    first: bytes
    rollouts: int
    found: asyncio.Future[list[OpenRollout]]


class OpenRollouts:
    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._tickets: list[OpenTicket] = []
        """Those with rollouts that are not over, the oldest first."""
        self._wanted: deque[_Wanted] = deque()
        self._closed = False
        self.newest = 0
        """The newest version that has sampled a turn."""

    @contextmanager
    def offered(self, served: GatewayRollout, prompt_id: str) -> Iterator[OpenRollout]:
        """A rollout that may be taken within the context."""
        ticket = next((one for one in self._tickets if one.prompt_id == prompt_id and self._grows(one)), None)
        if ticket is None:
            self._tickets.append(ticket := OpenTicket(prompt_id))
        rollout = OpenRollout(served=served, ticket=ticket)
        ticket.rollouts.append(rollout)
        self._hand_out()
        try:
            yield rollout
        finally:
            rollout.fail("agent_failed", "its rollout is over")  # nobody may take it any more
            self._over(ticket)

    def playing(self) -> list[OpenRollout]:
        """The rollouts that were taken and have no score yet, the oldest ticket's first."""
        return [one for ticket in self._tickets for one in ticket.rollouts if one.playing]

    async def take(self, first: bytes, count: int) -> list[OpenRollout]:
        """Takes rollouts of one ticket. `first`: the digest of the request that begins them. Waits until there are so many. Raises
        Refused if there never will be."""
        if self._closed:
            raise _run_is_over()
        if count > self.group_size:
            said = f"n = {count} completions are more than the rollout.group_size = {self.group_size} of the run"
            raise Refused(400, f"{said}: set --env.group_size {self.group_size}")
        wanted = _Wanted(first, count, asyncio.get_running_loop().create_future())
        self._wanted.append(wanted)
        self._hand_out()
        try:
            return await wanted.found
        except asyncio.CancelledError:
            for one in wanted.found.result() if wanted.found.done() and not wanted.found.cancelled() else ():
                one.fail("agent_failed", "the environment closed the connection before its turn was sampled")
            raise

    async def close(self) -> None:
        """Refuses the requests that wait for a ticket, and all later ones."""
        self._closed = True
        for wanted in self._wanted:
            if not wanted.found.done():
                wanted.found.set_exception(_run_is_over())
        self._wanted.clear()
        await asyncio.sleep(0)

    def extended(self, rollout: OpenRollout, turn: TreeReply) -> None:
        """Takes note of a turn."""
        rollout.extended(turn)
        if turn.completion and turn.completion.spans:
            self.newest = max(self.newest, turn.completion.spans[-1].version)

    def _grows(self, ticket: OpenTicket) -> bool:
        return len(ticket.rollouts) < self.group_size and not ticket.first

    def _hand_out(self) -> None:
        for wanted in [one for one in self._wanted if not one.found.cancelled()]:
            if found := self._find(wanted.first, wanted.rollouts):
                for one in found:
                    one.taken.set()
                wanted.found.set_result(found)
        self._wanted = deque(one for one in self._wanted if not one.found.done())

    def _find(self, first: bytes, count: int) -> list[OpenRollout]:
        begun = (one for one in self._tickets if one.first == first and len(one.free()) >= count)
        whole = (one for one in self._tickets if not one.first and len(one.free()) == self.group_size)
        ticket = next(begun, None) or next(whole, None)
        if ticket is None:
            return []
        ticket.first = first
        return ticket.free()[:count]

    def _over(self, ticket: OpenTicket) -> None:
        """Ends the rollouts that nobody has asked for when all others of their ticket are over."""
        left = [one for one in ticket.rollouts if not one.ended.done()]
        if not any(one.taken.is_set() for one in left):
            begun = len(ticket.rollouts) - len(left)
            for one in left if ticket.first else ():
                said = f"the environment has asked for {begun} of the {len(ticket.rollouts)} rollouts of its group"
                one.fail("environment_turns", f"{said}: its rollouts begin with different messages, or it was ended")
        if all(one.ended.done() for one in ticket.rollouts) and ticket in self._tickets:
            self._tickets.remove(ticket)


def _run_is_over() -> Refused:
    return Refused(503, "the run is over", "rollout_over")
