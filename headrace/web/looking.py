"""Looks at files that a client has named. A file system that does not answer must hold up neither the server nor its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.web.errors import Refused, busy

T = TypeVar("T")

SECONDS = 30.0
"""Time that a look may take."""
AT_ONCE = 8
"""Looks that may be under way. Those at a file system that does not answer may last for ever."""


class Looks:
    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(AT_ONCE)

    async def at(self, place: Path, look: Callable[[], T]) -> T:
        """Returns what `look` returns, and raises what it raises. It has a thread of its own, which no end of the process waits for. Raises
        Refused where it takes too long."""
        if not self._free.acquire(blocking=False):
            raise busy(f"{AT_ONCE} requests wait for files already; try again")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if not found.done():  # else nobody waits for it any more
                found.set_exception(error) if error else found.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, wrong = None, None
            try:
                result = look()
            except Exception as error:
                wrong = error
            self._free.release()
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, wrong)

        threading.Thread(target=run, name="look", daemon=True).start()
        try:
            async with asyncio.timeout(SECONDS):
                return await found
        except TimeoutError:
            raise Refused(
                503,
                f"{place} has not answered for {SECONDS:g} s: its file system is slow or gone; try again, or copy it",
            ) from None
        except OSError as error:
            raise Refused(400, f"{place} cannot be read: {error.strerror}") from None
