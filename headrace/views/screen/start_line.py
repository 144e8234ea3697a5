"""The line that says what a start waits for, before a run has a directory and a view: on standard error, from the first second."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from headrace.core.printing import printable
from headrace.facts.texts import clip

EVERY = 0.5
"""Seconds between two looks; what is over sooner is not shown."""
WIDTH = 79


class StartSteps:
    """The things that are done at the moment, and a line that says so."""

    def __init__(self) -> None:
        self._now: dict[str, None] = {}

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """`what`: words after "headrace: ", such as `reading the task`."""
        self._now[what] = None
        try:
            yield
        finally:
            self._now.pop(what, None)

    @property
    def words(self) -> str:
        return printable(", ".join(self._now))

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Shows the steps within this context. On a terminal they are one line, which is gone in the end; elsewhere each change is a line."""
        showing = asyncio.create_task(self._show())
        try:
            yield
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing

    async def _show(self) -> None:
        began, message, terminal = time.monotonic(), "", sys.stderr.isatty()
        try:
            while True:
                await asyncio.sleep(EVERY)
                if terminal:
                    line = ", ".join(filter(None, (f"headrace: {time.monotonic() - began:.0f} s", self.words)))
                    _put(f"\r{clip(line, WIDTH)}\x1b[K")
                elif self.words not in ("", message):
                    message = self.words
                    _put(f"headrace: {message}\n")
        finally:
            if terminal:
                _put("\r\x1b[K")


def _put(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads
        unguarded = getattr(sys.stderr, "unguarded", sys.stderr)  # its own escapes are to arrive
        unguarded.write(text)
        unguarded.flush()
