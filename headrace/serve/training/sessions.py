"""Sessions of clients: whoever has not been heard of for a while has left, and what belongs to it is freed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.run.clients.process_trainer import StateLost
from headrace.serve.training.futures import FutureAnswer, Futures, Promise, failure_of
from headrace.serve.training.samplers import Sampler
from headrace.serve.training.tinker_messages import CreateSession, LoraBody
from headrace.web.errors import Refused

# --- The adapter of one client
# Its requests in the order of their numbers, and what they came to.
#
# A client numbers the requests of a model 1, 2, 3, ... and sends several at once, so that they may arrive in another order. Each is done
# after the one before it. Requests of different models go to the trainer as they come, one of each model at a time.


Work = Callable[[], Awaitable[FutureAnswer]]

REMEDY = "What this model has learned since its last save_state is lost; continue with create_training_client_from_state_with_optimizer"


@dataclass(kw_only=True)
class TrainingAccount:
    """The cost of a model so far."""

    forward_tokens: int = 0
    """Tokens of forward passes without a backward pass."""
    trained_tokens: int = 0
    """Tokens of forward and backward passes."""
    steps: int = 0
    saves: int = 0


@dataclass(kw_only=True)
class Model:
    id: str
    session: str
    lora: LoraBody
    futures: Futures
    gap_seconds: float
    version: int = 0
    """Optimizer steps of its weights, those before a checkpoint that it was loaded from included."""
    account: TrainingAccount = field(default_factory=TrainingAccount)
    lost: str = ""
    """The reason why nothing can be done with it any more; empty while it can be used."""
    _waiting: dict[int, tuple[Promise, Work]] = field(default_factory=dict)
    _next: int = 1
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._run())

    def submit(self, number: int, promise: Promise, work: Work) -> None:
        if self.lost or number < self._next:
            late = f"request {number} of {self.id} comes after request {self._next - 1}, which is done"
            self.futures.resolve(promise, failure_of(StateLost(self.lost) if self.lost else ValueError(late)))
            return
        self._waiting[number] = promise, work
        self._arrived.set()

    def lose(self, why: str) -> None:
        """Gives the session up: everything that waits fails with `why`, and so does all that comes."""
        self.lost = self.lost or why
        for promise, _ in self._waiting.values():
            self.futures.resolve(promise, failure_of(StateLost(self.lost)))
        self._waiting.clear()

    async def end(self) -> None:
        """Ends what is being done, too."""
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        while not self.lost:
            if self._next not in self._waiting:
                await self._until_next()
                continue
            promise, work = self._waiting.pop(self._next)
            self._next += 1
            await self._do(promise, work)

    async def _until_next(self) -> None:
        """Waits for the next number, without end while nothing else waits."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(self.gap_seconds if self._waiting else None):
                await self._arrived.wait()
        except TimeoutError:
            later = min(self._waiting)
            self.lose(
                f"request {self._next} of {self.id} has not arrived within {self.gap_seconds:g} s of request {later}, which has to "
                f"follow it. {REMEDY}"
            )

    async def _do(self, promise: Promise, work: Work) -> None:
        try:
            answer = await work()
        except StateLost as error:
            self.lose(f"{error}. {REMEDY}")
            answer = failure_of(StateLost(self.lost))
        except Exception as error:  # one that began after the trainer's death finds no such model in the new process
            answer = failure_of(StateLost(self.lost) if self.lost else error)
        except asyncio.CancelledError as error:
            self.futures.resolve(promise, failure_of(error))
            raise
        self.futures.resolve(promise, answer)


# --- sessions ------------------------------------------------------------


MOST_OVER = 1024
"""Sessions that are over and whose end is still remembered."""


@dataclass(kw_only=True)
class ClientSession:
    id: str
    wishes: CreateSession
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    """Paths of weights that were saved without a name, for this session only."""
    ending: str = ""
    """The reason why it is over; empty while it is not."""
    timer: asyncio.TimerHandle | None = None


class Sessions:
    def __init__(self, seconds: float, free: Callable[[ClientSession], Coroutine[Any, Any, None]]) -> None:
        """`seconds` without a heartbeat end a session. `free` is called once with each session that is over."""
        self._seconds, self._free = seconds, free
        self._sessions: dict[str, ClientSession] = {}
        self._freeing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Any:
        return iter([session for session in self._sessions.values() if not session.ending])

    def begin(self, wishes: CreateSession) -> ClientSession:
        kept = msgspec.structs.replace(wishes, user_metadata=None, tags=[])  # they have no effect, and any size
        session = ClientSession(id=str(uuid.uuid4()), wishes=kept)
        over = [other.id for other in self._sessions.values() if other.ending]
        for old in over[: max(0, len(over) - MOST_OVER)]:
            del self._sessions[old]
        self._sessions[session.id] = session
        self._wind(session)
        return session

    def get(self, name: str) -> ClientSession:
        """Raises Refused: 404 for one that never was, 410 for one that is over."""
        session = self._sessions.get(name)
        if session is None:
            raise Refused(404, f"there is no session {name} here; the server may have been started again", "not_found")
        if session.ending:
            raise Refused(410, f"the session {name} is over: {session.ending}", "gone")
        return session

    def of(self, member: str) -> ClientSession:
        """The session of a model or sampler, whose id begins with its own."""
        return self.get(member.partition(":")[0])

    def heard(self, name: str) -> None:
        self._wind(self.get(name))

    def end(self, session: ClientSession, why: str) -> asyncio.Task[None]:
        """Returns the task that frees what belongs to it."""
        session.ending = why
        if session.timer:
            session.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._free(session))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)
        return task

    async def finish(self, name: str, why: str) -> None:
        """Returns when it is freed. Does nothing for one that is over: a client that lost the answer asks again."""
        session = self._sessions.get(name)
        if session is None or not session.ending:
            await self.end(self.get(name), why)

    async def close(self) -> None:
        for session in self:
            self.end(session, "the server is being stopped")
        await asyncio.gather(*self._freeing, return_exceptions=True)

    def _wind(self, session: ClientSession) -> None:
        if session.timer:
            session.timer.cancel()
        why = f"nothing was heard of its client for {self._seconds:g} s"
        session.timer = asyncio.get_running_loop().call_later(self._seconds, self.end, session, why)
