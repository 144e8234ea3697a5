"""One rollout as the gateway sees it: the secret that names it, its agents with their conversations, and its requests in progress."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.core.errors import RolloutOver
from headrace.core.types import Completion
from headrace.episodes.environments.gateway.chat_tree import ChatTree, TreeReply
from headrace.episodes.environments.gateway.text_tree import TextTree
from headrace.processes.health.patience import within
from headrace.web.errors import Refused
from headrace.web.formats.responses import StoredResponses

T = TypeVar("T")

SECRET_BYTES = 24
"""192 random bits, which nobody guesses."""
MOST_SPEAKERS = 256
"""Agents of one rollout."""

Talks = Callable[[str], tuple[ChatTree, TextTree]]
"""Makes the conversations and the texts of an agent, by its name."""


class Speaker:
    """One agent of a rollout: the policy in a role, with conversations of its own."""

    def __init__(self, name: str, rollout: GatewayRollout, talks: Talks) -> None:
        self.name, self.rollout = name, rollout
        self.chats, self.texts = talks(name)
        self.last: Completion | None = None
        """The completion of its last turn."""

    def answered(self, answer: TreeReply) -> None:
        """Takes note of a turn."""
        self.rollout.answered += 1
        self.last = answer.completion or self.last


class GatewayRollout:
    def __init__(self, talks: Talks) -> None:
        self.secret = secrets.token_urlsafe(SECRET_BYTES)
        self._talks = talks
        self._speakers: dict[tuple[str, str], Speaker] = {}
        """Its agents by the role and the session that their requests name."""
        self.responses = StoredResponses()
        self.answered = 0
        """Requests for a turn that were answered."""
        self.error = ""
        """The last refusal, in words; empty if every request was served."""
        self.over = asyncio.Event()
        """Set when a request has failed in a way that ends the rollout or the run."""
        self.broken: Exception | None = None
        """The error of that request, if it was not the agent's."""
        self._closed = False
        self._working: set[asyncio.Task[Any]] = set()
        self.changed = asyncio.Event()
        """Set when the first request begins, and when the last one ends."""

    @property
    def asking(self) -> int:
        """Requests in progress."""
        return len(self._working)

    def speaker(self, role: str = "", session: str = "") -> Speaker:
        """Returns the agent that a request names. An agent that comes after another one of its role has a number in its name: `solver`,
        `solver 2`. `role`: empty for the only one. `session`: tells those of one role apart. Raises Refused if there are too many."""
        if found := self._speakers.get((role, session)):
            return found
        if len(self._speakers) >= MOST_SPEAKERS:
            raise Refused(400, f"the rollout has {MOST_SPEAKERS} agents already; ask in one of their roles")
        number = 1 + sum(one == role for one, _ in self._speakers)
        name = f"{role or 'agent'} {number}" if number > 1 else role
        while self.speaker_named(name):  # `solver 2` may be a role, or the second agent of `solver`
            if number == 1:
                raise Refused(400, f"the rollout has another agent of the name {name}; give the role another name")
            number += 1
            name = f"{role or 'agent'} {number}"
        self._speakers[role, session] = speaker = Speaker(name, self, self._talks)
        return speaker

    def speaker_named(self, name: str) -> Speaker | None:
        return next((one for one in self._speakers.values() if one.name == name), None)

    def speaker_in(self, session: str) -> Speaker | None:
        """Returns the agent whose requests named this session."""
        return next((one for (_, named), one in self._speakers.items() if named == session), None)

    def refused(self, refusal: Refused) -> Refused:
        """Notes why a request was refused."""
        self.error = refusal.message
        return refusal

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work of one request. Raises what it raises, and RolloutOver if the rollout is closed meanwhile."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        self.changed.set()
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise RolloutOver("its agent has ended") from None
            raise
        finally:
            self._working.discard(task)
            self.changed.set()

    async def until(self, ended: asyncio.Future[T], seconds: float, who: int) -> T | None:
        """Waits for the end of what plays the rollout, and returns its result; None if the rollout has failed before. `seconds`: the time
        that it may take between its turns, 0 for any; sampling does not count. `who`: the process that takes this time.

        Raises TimeoutError when they are used up, what ended the engine, and what `ended` raises."""
        over = asyncio.ensure_future(self.over.wait())
        left, clock = seconds, asyncio.get_running_loop().time
        try:
            while not (ended.done() or over.done()):
                self.changed.clear()
                since, asking = clock(), self.asking > 0
                changed = asyncio.ensure_future(self.changed.wait())
                awaited: set[asyncio.Future[Any]] = {ended, over, changed}
                first = asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                try:
                    await (first if asking or not left else within(who, left, first))
                finally:
                    changed.cancel()
                if left and not asking:
                    left = max(left - (clock() - since), 1e-3)
            if self.broken:
                raise self.broken
            return ended.result() if ended.done() else None
        finally:
            over.cancel()

    async def close(self) -> None:
        """Ends the requests in progress."""
        self._closed = True
        tasks = list(self._working)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
