"""Log lines that strangers can cause: one a second, with the number of those that were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY = 1.0
"""Seconds between two lines."""


class OneLine(logging.Filter):
    """Lets one record through in each `EVERY` seconds."""

    def __init__(self, about: Callable[[logging.LogRecord], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """`about`: whether a record is one of those that are counted; others pass."""
        super().__init__()
        self._about, self._clock = about, clock
        self._next, self._left_out = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._about(record):
            return True
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return False
        if self._left_out:
            record.msg, record.args = f"{record.getMessage()} (lines left out since the last one: {self._left_out})", ()
        self._next, self._left_out = now + EVERY, 0
        return True


_SERVER = OneLine(lambda record: True)
_LOOP = OneLine(lambda record: "socket.accept()" in record.getMessage())
"""The event loop's own lines about connections that it cannot accept, and none of the user's."""


def calm_logs() -> None:
    """Limits the lines of servers in this process. May be called again."""
    logging.getLogger("uvicorn.error").addFilter(_SERVER)
    logging.getLogger("asyncio").addFilter(_LOOP)
