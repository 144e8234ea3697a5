"""Named waits (C6): nothing hangs in silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from headrace.errors import StalledError
from headrace.observe.facts import Fact, Waited, Warned

WORTH_RECORDING = 0.01
"""Seconds. Shorter waits are not stalls, and recording them would cost more than they last."""


class Waits:
    """Who waits for whom, since when. A wait past `warn_after` is reported; past `stop_after` it ends the run."""

    def __init__(
        self, record: Callable[[Fact], None], clock: Callable[[], float], warn_after: float, stop_after: float
    ) -> None:
        self._record, self._clock = record, clock
        self._warn_after, self._stop_after = warn_after, stop_after
        self._current: dict[object, tuple[float, str, str]] = {}

    @contextlib.asynccontextmanager
    async def named(self, owner: str, what: str) -> AsyncIterator[None]:
        """`async with waits.named("trainer", "8 scored groups"): ...`. Raises `StalledError` at the second deadline."""
        key, since = object(), self._clock()
        self._current[key] = (since, owner, what)
        alarm = asyncio.get_running_loop().call_later(self._warn_after, self._warn, key)
        try:
            async with asyncio.timeout(self._stop_after) as deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            raise StalledError(f"stopped: {self._sentence(key)}. All waits: {self.picture()}") from None
        finally:
            alarm.cancel()
            del self._current[key]
            if (seconds := self._clock() - since) >= WORTH_RECORDING:
                self._record(Waited(self._clock(), owner, what, seconds))

    def picture(self) -> str:
        """One line: every wait that lasts at this moment, longest first."""
        ordered = sorted(self._current, key=lambda key: self._current[key][0])
        return "; ".join(self._sentence(key) for key in ordered) or "nobody waits"

    def _sentence(self, key: object) -> str:
        since, owner, what = self._current[key]
        return f"{owner} has waited {self._clock() - since:.0f} s for {what}"

    def _warn(self, key: object) -> None:
        self._record(Warned(self._clock(), f"{self._sentence(key)} (the run stops at {self._stop_after:.0f} s)"))
