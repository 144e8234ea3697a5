"""Results that clients fetch later: a request is answered with an id at once, and the client asks for the result under that id.

A result stays for a while after it has been fetched, so that a client whose connection broke can ask again. The id of a request is made
from what its client numbers, so that a request that is sent twice is done once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.core.errors import HeadraceError, UnexpectedError, WorkerDied
from headrace.run.clients.process_trainer import StateLost
from headrace.serve.config import TrainLimits
from headrace.serve.training.tinker_messages import PROTOBUF
from headrace.web.errors import Refused, log_internal, without_paths
from headrace.web.sending import JSON

Category = Literal["user", "server", "unknown"]
"""The side whose fault a failure is, in the words of the API."""
CANCELLED = "the request was cancelled, or its session has ended"


@dataclass(frozen=True)
class FutureAnswer:
    body: bytes
    media: str

    @classmethod
    def json(cls, value: Any) -> FutureAnswer:
        return cls(msgspec.json.encode(value), JSON)

    @classmethod
    def protobuf(cls, body: bytes) -> FutureAnswer:
        return cls(body, PROTOBUF)

    @classmethod
    def failure(cls, sentence: str, category: Category) -> FutureAnswer:
        return cls.json({"error": without_paths(sentence), "category": category})


@dataclass(kw_only=True)
class Promise:
    id: str
    owner: str
    """The session that asked."""
    content: bytes = b""
    """A digest of what it asked for; empty where that was refused, which is then the answer."""
    waiting_for: str = ""
    """Set while it cannot run, with the reason."""
    task: asyncio.Task[None] | None = None
    """The work, where it has a task of its own; a cancellation ends it."""
    answer: FutureAnswer | None = None
    there: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = 0.0
    """The time at which the answer was there."""


def failure_of(error: BaseException) -> FutureAnswer:
    """An error that names the remedy is the client's; any other is the server's."""
    if isinstance(error, asyncio.CancelledError):
        return FutureAnswer.failure(CANCELLED, "user")
    if isinstance(error, Refused):
        return FutureAnswer.failure(error.message, "user" if error.status < 500 else "server")
    if isinstance(error, (StateLost, WorkerDied)):
        return FutureAnswer.failure(str(error), "server")
    if isinstance(error, UnexpectedError):
        log_internal(error)
        return FutureAnswer.failure(error.headline, "server")
    if isinstance(error, (ValueError, HeadraceError)):
        return FutureAnswer.failure(str(error), "user")
    return FutureAnswer.failure(f"{type(error).__name__}: {error}", "server")


class Futures:
    def __init__(self, limits: TrainLimits) -> None:
        self._limits = limits
        self._promises: dict[str, Promise] = {}
        self._done: OrderedDict[str, int] = OrderedDict()
        """Promises with an answer, the oldest first, with its size."""
        self._bytes = 0

    @property
    def pending(self) -> int:
        return len(self._promises) - len(self._done)

    def find(self, name: str) -> Promise | None:
        return self._promises.get(name)

    def sent_before(self, name: str, content: bytes) -> Promise | None:
        """Returns the promise of a request that is sent again. Raises Refused for another request with its number, which would be answered with what
        was never asked for: clients that share a session, or one that counts wrongly."""
        there = self._promises.get(name)
        if there is not None and there.content not in (b"", content):
            message = (
                f"the number of {name} was used before, by another request; give every request a number of its own"
            )
            raise Refused(400, message, "number_used")
        return there

    def open(self, name: str, owner: str, content: bytes = b"") -> Promise:
        """A new promise. Raises Refused (429) where too many are pending; the client tries again later."""
        assert name not in self._promises, "look for it before"
        self._forget_old()
        if self.pending >= self._limits.pending:
            raise Refused(
                429, f"{self.pending} requests are pending, and {self._limits.pending} may be; try again", "busy"
            )
        promise = self._promises[name] = Promise(id=name, owner=owner, content=content)
        return promise

    def start(self, promise: Promise, work: Coroutine[Any, Any, FutureAnswer]) -> None:
        """Runs `work` in a task of its own, whose result or error is the promise's answer."""

        async def run() -> None:
            try:
                self.resolve(promise, await work)
            except BaseException as error:
                self.resolve(promise, failure_of(error))
                if not isinstance(error, Exception):
                    raise

        promise.task = asyncio.get_running_loop().create_task(run())

        def over(_: object) -> None:
            work.close()  # a task that is cancelled before it has begun never comes to its own handling of that
            self.resolve(promise, failure_of(asyncio.CancelledError()))

        promise.task.add_done_callback(over)

    def resolve(self, promise: Promise, answer: FutureAnswer) -> None:
        """The first answer counts."""
        if promise.answer is None:
            promise.answer, promise.since = answer, time.monotonic()
            self._done[promise.id] = len(answer.body)
            self._bytes += len(answer.body)
            promise.there.set()

    async def wait(self, name: str) -> FutureAnswer | None:
        """The answer; None if it is not there within `poll_seconds`. Raises Refused (410) for a promise that is not known here."""
        promise = self._promises.get(name)
        if promise is None:
            raise Refused(
                410,
                f"there is no request {name} here: the server was started again, or its result was dropped "
                f"{self._limits.kept_seconds:g} s after it was there",
                "gone",
            )
        try:
            async with asyncio.timeout(self._limits.poll_seconds):
                await promise.there.wait()
        except TimeoutError:
            return None
        return promise.answer

    def cancel(self, name: str) -> None:
        promise = self._promises.get(name)
        if promise and promise.task:
            promise.task.cancel()

    def end(self, owner: str) -> None:
        """Ends what a session has pending."""
        for promise in [
            promise for promise in self._promises.values() if promise.owner == owner and promise.answer is None
        ]:
            if promise.task:
                promise.task.cancel()
            self.resolve(promise, failure_of(asyncio.CancelledError()))

    def _forget_old(self) -> None:
        ripe = time.monotonic() - self._limits.kept_seconds
        while self._done:
            name = next(iter(self._done))
            if self._bytes <= self._limits.kept_bytes and self._promises[name].since > ripe:
                return
            self._bytes -= self._done.pop(name)
            del self._promises[name]
