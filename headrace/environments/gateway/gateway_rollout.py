"""One rollout as the gateway sees it: the secret that names it, its conversations, and its requests in progress."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.environments.gateway.chat_tree import ChatTree
from headrace.errors import RolloutOver

T = TypeVar("T")

SECRET_BYTES = 24
"""192 random bits, which nobody guesses."""


class GatewayRollout:
    def __init__(self, tree: ChatTree) -> None:
        self.secret = secrets.token_urlsafe(SECRET_BYTES)
        self.tree = tree
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

    async def close(self) -> None:
        """Ends the requests in progress."""
        self._closed = True
        tasks = list(self._working)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
