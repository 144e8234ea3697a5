"""One engine of a fleet: whether it serves, its requests, and the weights that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from headrace.core.protocols import Engine
from headrace.core.reports import EngineStats, LoadReport
from headrace.core.steps import Finished
from headrace.core.types import Request
from headrace.engine.request_book import Pending

T = TypeVar("T")

State = Literal["serving", "away", "resting", "lost", "removed"]
"""serving: in the rotation. away: out of it, until it answers and has the newest weights. resting: it is asked for nothing, because the trainer has
its devices. lost: it does not come back. removed: a person has taken it out."""

Held = Literal["", "drain"]


class MemberEngine(Engine, Protocol):
    """An engine that can be a member of a fleet."""

    async def until_end(self, request: Request) -> Finished:
        """`generate` for a caller that hears the tokens (`listen`): no completion is made."""

    async def absence(self) -> str:
        """Returns the reason as soon as the engine cannot serve (its process has died, its server does not answer), and at once
        if it cannot now. `stats` is answered again when it can."""


@dataclass(eq=False, kw_only=True)
class Attempt:
    """A request on its way through one member."""

    pending: Pending
    member: Member
    floor: int
    """The version that the member had when the request came to it. A token of an older one is not accepted."""
    group: object
    """Requests of equal ones have their prompt in common."""
    had: int
    """Tokens that the request had when it came to the member."""
    task: asyncio.Task[None] | None = None

    @property
    def waits(self) -> bool:
        """Whether nothing was heard of it yet: it may wait for a row, or its prompt be computed."""
        pending = self.pending
        return len(pending.sampled) == self.had and not (pending.done.done() or pending.aborted)

    async def over(self) -> None:
        """Returns when the member has done with the request, or has left the rotation: then its id can be used again."""
        assert self.task is not None
        await asyncio.wait([self.task, self.member.gone], return_when=asyncio.FIRST_COMPLETED)


@dataclass(eq=False, kw_only=True)
class Member:
    """`name`: its address or number, for people."""

    name: str
    engine: MemberEngine
    lent: bool = False
    """Whether its devices are the trainer's, which lends them while it waits. It begins resting."""
    state: State = "away"
    why: str = ""
    """The reason why it does not serve."""
    versions: dict[str, int] = field(default_factory=dict)
    """The live versions by adapter; the base model has the empty name. Empty while it is not known what the member has."""
    reports: dict[str, LoadReport] = field(default_factory=dict)
    """The report of the newest load, by adapter."""
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Its requests, by id."""
    known_rows: bytes = b""
    """The rows of an output that was accepted, while its requests are the same: others with these rows are accepted too."""
    leaving: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests that were taken away from it and have not left it yet."""
    stats: EngineStats = field(default_factory=EngineStats)
    """Its last statistics."""
    rate: float = 0.0
    """Tokens per second between its last two statistics."""
    absences: int = 0
    """Number of times that it has left the rotation."""
    accepted: int = 0
    """Tokens that were accepted from it."""
    unlike: int = -1
    """The version at which its last probe failed; -1 if it did not."""
    held: Held = ""
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done as soon as it leaves the rotation."""

    @property
    def serves(self) -> bool:
        return self.state == "serving"

    @property
    def tokens(self) -> int:
        """Tokens of its requests: what its KV cache has to hold for them. A prompt that they have in common counts once."""
        prompts = {attempt.group: len(attempt.pending.request.prompt) for attempt in self.attempts.values()}
        return sum(prompts.values()) + sum(
            len(attempt.pending.request.prefix) + len(attempt.pending.sampled) for attempt in self.attempts.values()
        )

    @property
    def rows(self) -> int:
        """Requests that it samples for at once: as it declares, or as its last statistics show if requests waited there. 0: not known."""
        return self.engine.capabilities.rows or (max(1, self.stats.running) if self.stats.waiting else 0)

    @property
    def queue(self) -> int:
        """Requests that wait there for a row."""
        return max(0, len(self.attempts) - self.rows) if self.rows else 0

    @property
    def is_crowded(self) -> bool:
        """Whether requests wait there, for a row or for KV cache."""
        return self.queue > 0 or not self._has_cache(0)

    def has_room(self, tokens: int) -> bool:
        """Whether a request that brings so many tokens would begin at once: a row is free, and its KV cache has room."""
        return (not self.rows or len(self.attempts) < self.rows) and self._has_cache(tokens)

    def _has_cache(self, tokens: int) -> bool:
        kv = self.engine.capabilities.kv_tokens
        return not kv or self.tokens + tokens <= kv

    def leave(self, why: str, state: State = "away") -> None:
        self.state, self.why = state, why
        self.absences += 1
        self.versions.clear()
        if not self.gone.done():
            self.gone.set_result(None)

    def enter(self) -> None:
        self.state, self.why = "serving", ""
        self.gone = asyncio.get_running_loop().create_future()

    async def while_serving(self, work: Awaitable[T]) -> T | None:
        """Returns the result of `work`, or None as soon as the member leaves the rotation. Raises what `work` raises."""
        task, gone = asyncio.ensure_future(work), self.gone
        ends: list[asyncio.Future[Any]] = [task, gone]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() and not gone.done() else None
        finally:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # of a member that has left: its care finds out what is wrong with it

    def sampled(self, stats: EngineStats, seconds: float) -> None:
        """Notes new statistics, which were taken `seconds` after the ones before."""
        if seconds > 0:
            self.rate = max(0, stats.sampled_tokens - self.stats.sampled_tokens) / seconds
        self.stats = stats
