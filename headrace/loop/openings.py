"""Rollouts of several turns: only as many are open as the KV cache of the engine holds.

    wants to begin ──its tokens fit──▶ sampled ⇄ between turns (a tool, a judge, a person) ──▶ closed
                                                  its entries count for as long as they would take to be sampled

A turn needs the entries of all turns before it. Where more rollouts are open than the cache holds, each turn pushes out what the next one
needs, and prompts are computed again and again, without a preemption that anybody could see. So the first turn of a rollout waits until the
rollout fits, and later turns never wait.

Nothing waits for ever, whatever rollouts wait for: while no turn is sampled, the next rollout is opened, because an engine with nothing to do is
worse than entries that are computed again. And a rollout whose tool takes longer than its entries would take to be sampled is counted no
more: to keep what costs no more than it has cost to keep it so far is at most twice as dear as to know when the tool answers (the rule of
rent or buy: Karlin et al., Competitive snoopy caching, Algorithmica 1988).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.core.types import Completion

LONGEST = 30.0
"""Seconds between two turns after which a rollout is counted no more, however long its entries would take."""
SHARE = 0.9
"""Part of the cache that is used: lengths are expected, not known, and the last block of each sequence is half empty."""
MEMORY = 32
"""Rollouts over which the mean length is taken (exponentially weighted)."""
KNOWN = 8
"""Rollouts after whose ends the mean is good enough for advice."""

Rollout = tuple[int, int]
"""Ticket, and place in its group."""


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The room of an engine."""

    tokens: int = 0
    """Tokens of its KV cache, over all members of a fleet. 0: not known, and rollouts do not wait."""
    rows: int = 0
    """Sequences that it samples at once."""
    longest: int = 0
    """The most tokens of a rollout."""
    kv_gib: float = 0.0
    """`engine.kv_gib`, for advice."""


@dataclass
class _Open:
    ticket: int
    prompt: int
    """Tokens that it has in common with the others of its group."""
    tokens: int
    """Its other tokens, as far as is known."""
    sampling: int = 1
    """Turns that are being sampled, those included that begin as soon as their tasks run."""
    since: float = 0.0
    """The moment at which a turn of it was sampled last, on the loop's clock."""


class _Pace:
    """How fast tokens are sampled, of all rollouts together."""

    def __init__(self) -> None:
        self._tokens, self._seconds, self._since, self._turns = 0, 0.0, 0.0, 0

    def begin(self, now: float) -> None:
        if not self._turns:
            self._since = now
        self._turns += 1

    def end(self, now: float, tokens: int) -> None:
        self._turns -= 1
        self._tokens += tokens
        if not self._turns:
            self._seconds += now - self._since

    def seconds(self, tokens: int, now: float) -> float:
        """The time that the engine takes to sample so many tokens: to compute them again takes it no longer."""
        so_far = self._seconds + (now - self._since if self._turns else 0.0)
        return tokens * so_far / self._tokens if self._tokens else math.inf


class Openings:
    """The gate of first turns. Its clock is that of the running event loop."""

    def __init__(self, cache: CacheSize, warn: Callable[[str], None] = lambda said: None) -> None:
        self._cache, self._warn = cache, warn
        self._open: dict[Rollout, _Open] = {}
        self._waiting: list[tuple[Rollout, int, _Open, asyncio.Future[None]]] = []
        """A heap: the oldest ticket begins first. Those that were cancelled stay until they reach the top."""
        self._numbers = itertools.count()
        self._mean, self._ended = float(cache.longest), 0
        """Mean length of rollouts that have ended, without their prompts, and their number. The first one counts as if the longest had
        ended before it: short ones end first."""
        self._pace = _Pace()
        self._timer: asyncio.TimerHandle | None = None
        self._told = False

    @asynccontextmanager
    async def turn(
        self, rollout: Rollout, *, prompt: int, context: int, most: int
    ) -> AsyncIterator[Callable[[Completion], None]]:
        """Holds its body, which samples a turn, until the rollout is open. Yields what is called with the completion.

        `prompt`: tokens that the rollout has in common with its group; `context`: tokens before this turn; `most`: of its completion.

        Consumes: room in the engine's cache.
        Waits for: rollouts that began before.
        Unblocked by: the end of a turn, or of a rollout; time that passes between turns.
        """
        clock, own = asyncio.get_running_loop().time, context - prompt
        found = self._open.get(rollout)
        if found is None:
            found = await self._enter(rollout, _Open(rollout[0], prompt, own + most))
        else:
            found.sampling += 1
        self._pace.begin(clock())
        sampled = 0

        def done(completion: Completion) -> None:
            nonlocal sampled
            sampled = len(completion.tokens)
            found.tokens = max(found.tokens if found.since else 0, own + sampled)

        try:
            yield done
        finally:
            found.sampling, found.since = found.sampling - 1, clock()
            self._pace.end(clock(), sampled)
            self._admit()

    def close(self, rollout: Rollout) -> None:
        """The rollout is over. Nothing happens if it has not begun, or is closed already."""
        if found := self._open.pop(rollout, None):
            self._ended += 1
            self._mean += (found.tokens - self._mean) / min(self._ended + 1, MEMORY)
            self._advise()
            self._admit()

    def holds_back(self, ticket: int) -> bool:
        """Whether a rollout of this ticket waits for its begin."""
        return any(rollout[0] == ticket and not future.done() for rollout, *_, future in self._waiting)

    # -- admission ----------------------------------------------------------------------------------------------------------

    async def _enter(self, rollout: Rollout, newcomer: _Open) -> _Open:
        if not self._cache.tokens:
            return self._open.setdefault(rollout, newcomer)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rollout, next(self._numbers), newcomer, future))
        self._admit()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was let in at the same moment
                self._open[rollout].sampling -= 1
            raise
        return self._open[rollout]

    def _admit(self) -> None:
        """Opens those that fit, and looks again when one of those between turns is counted no more."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            rollout, _, newcomer, future = self._waiting[0]
            if not future.done():
                if not self._fits(newcomer):
                    break
                self._open_up(rollout, newcomer)
            heapq.heappop(self._waiting)
        loop = asyncio.get_running_loop()
        ends = [end for opened in self._open.values() if (end := self._counts_until(opened)) > loop.time()]
        if self._waiting and (finite := [end for end in ends if end < math.inf]):
            self._timer = loop.call_at(min(finite), self._admit)

    def _open_up(self, rollout: Rollout, newcomer: _Open) -> None:
        """Lets in all turns of a rollout that wait: agents of one may ask at the same time."""
        self._open[rollout] = newcomer
        turns = [future for other, _, _, future in self._waiting if other == rollout and not future.done()]
        newcomer.sampling = len(turns)
        for future in turns:
            future.set_result(None)

    def _counts_until(self, opened: _Open) -> float:
        if opened.sampling:
            return math.inf
        now = asyncio.get_running_loop().time()
        return opened.since + min(LONGEST, self._pace.seconds(opened.prompt + opened.tokens, now))

    def _fits(self, newcomer: _Open) -> bool:
        if not any(opened.sampling for opened in self._open.values()):
            return True
        now = asyncio.get_running_loop().time()
        counted = [opened for opened in self._open.values() if self._counts_until(opened) > now]
        return self._needed([*counted, newcomer]) <= SHARE * self._cache.tokens

    def _needed(self, rollouts: list[_Open]) -> float:
        prompts = {rollout.ticket: rollout.prompt for rollout in rollouts}
        return sum(prompts.values()) + sum(max(rollout.tokens, self._mean) for rollout in rollouts)

    def _advise(self) -> None:
        """Says once that the cache is what limits the number of rollouts: when their length is known, and at least as many wait as are open."""
        waiting = [newcomer for _, _, newcomer, future in self._waiting if not future.done()]
        there = list(self._open.values())
        lacking = min(len(waiting), self._cache.rows - len(there))
        if self._told or self._ended < KNOWN or lacking <= 0 or len(waiting) < len(there):
            return
        self._told = True
        gib = self._cache.kv_gib * self._needed(there + waiting[:lacking]) / (SHARE * self._cache.tokens)
        self._warn(
            f"the KV cache holds {len(there)} rollouts, of {self._mean:,.0f} tokens on average beside their prompts, and {len(waiting)} wait for "
            f"others to end, because more of them would push each other's entries out between turns: raise engine.kv_gib to "
            f"{math.ceil(10 * gib) / 10:g} to have {len(there) + lacking} open at once"
        )
