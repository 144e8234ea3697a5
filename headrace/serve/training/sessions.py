"""Sessions of clients: whoever has not been heard of for a while has left, and what belongs to it is freed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.serve.training.messages.json_bodies import CreateSession
from headrace.serve.training.models import Model
from headrace.serve.training.samplers import Sampler
from headrace.web.errors import Refused

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
        return iter([one for one in self._sessions.values() if not one.ending])

    def begin(self, wishes: CreateSession) -> ClientSession:
        kept = msgspec.structs.replace(wishes, user_metadata=None, tags=[])  # they have no effect, and any size
        session = ClientSession(id=str(uuid.uuid4()), wishes=kept)
        over = [one.id for one in self._sessions.values() if one.ending]
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
