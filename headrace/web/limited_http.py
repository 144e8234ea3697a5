"""One connection of a server, as uvicorn's own with h11, within the limits of `crowd.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.web.crowd import HEAD_SECONDS, READ_BYTES, STALLED_SECONDS, Crowd, Guest


class LimitedHttp(H11Protocol):
    def __init__(self, crowd: Crowd, **more: Any) -> None:
        super().__init__(**more)
        self._crowd = crowd
        self._guest: Guest
        self._deadline: asyncio.TimerHandle | None = None
        """Set while the head of a request is awaited."""
        self._stalled: asyncio.TimerHandle | None = None
        """Set while the client reads nothing of what waits for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # of asyncio's own transports
            transport.max_size = READ_BYTES
        self._await_head()
        self._guest = self._crowd.came(self._make_room)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.left(self._guest)
        self._forget_deadline()
        self._forget_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def handle_events(self) -> None:
        super().handle_events()
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        asking = self.cycle is not None and not self.cycle.response_complete
        if asking:
            self._forget_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._await_head()
        if asking and not self.cycle.more_body:
            self._crowd.asked(self._guest)
        else:
            self._crowd.waits(self._guest)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _make_room(self) -> None:
        self.logger.warning("Too many connections: one that had sent no whole request was closed.")
        self.transport.abort()
