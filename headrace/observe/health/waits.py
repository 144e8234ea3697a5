"""Named waits (C6): nothing hangs in silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.errors import StalledError
from headrace.observe.facts import Fact, Waited, Warned
from headrace.types import Struct

WORTH_RECORDING = 0.01
"""Seconds. Shorter waits are not stalls, and recording them would cost more than they last."""


class Lasting(Struct, frozen=True):
    """A wait that is not over."""

    owner: str
    what: str
    seconds: float
    endless: bool = False
    """It has no second deadline."""

    def __str__(self) -> str:
        return f"{self.owner} has waited {self.seconds:.0f} s for {self.what}"


@dataclass(frozen=True)
class Testimony:
    """What a look at the processes found: who is to blame in a few words, and everything in many lines."""

    brief: str
    lines: Sequence[str] = ()


Witness = Callable[[Lasting, Sequence[Lasting]], Awaitable[Testimony]]
"""Asked before a wait is stopped, while whoever hangs still hangs: the wait, and all waits of the moment."""


@dataclass(eq=False)
class _Wait:
    owner: str
    what: str
    since: float
    timeout: asyncio.Timeout
    endless: bool = False
    spared: float = 0.0
    """Seconds by which its second deadline is put off."""
    alarms: list[asyncio.TimerHandle] = field(default_factory=list)
    stopping: asyncio.Task[None] | None = None
    error: StalledError | None = None


class Waits:
    """Who waits for whom, since when. A wait past `warn_after` is reported; past `stop_after` it ends the run."""

    def __init__(
        self, record: Callable[[Fact], None], clock: Callable[[], float], warn_after: float, stop_after: float
    ) -> None:
        self._record, self._clock = record, clock
        self._warn_after, self._stop_after = warn_after, stop_after
        self._current: dict[_Wait, None] = {}
        self.witness: Witness | None = None

    @contextlib.asynccontextmanager
    async def named(self, owner: str, what: str, endless: bool = False) -> AsyncIterator[None]:
        """`async with waits.named("trainer", "8 scored groups"): ...`. Raises `StalledError` at the second deadline.

        `endless`: what has no bound that we could know, a download say. It is reported every `warn_after` seconds and never stopped.
        """
        wait = _Wait(owner, what, self._clock(), asyncio.timeout(None), endless)
        self._current[wait] = None
        self._set_alarms(wait, self._warn_after, self._stop_after)
        try:
            async with wait.timeout:
                yield
        except TimeoutError:
            if not wait.timeout.expired():
                raise
            assert wait.error is not None
            raise wait.error from None
        finally:
            del self._current[wait]
            _silence(wait)
            if wait.stopping:
                wait.stopping.cancel()
            if (seconds := self._clock() - wait.since) >= WORTH_RECORDING:
                self._record(Waited(self._clock(), owner, what, seconds))

    def lasting(self) -> list[Lasting]:
        """Longest first. May be called from any thread."""
        now = self._clock()
        waits = [Lasting(one.owner, one.what, now - one.since, one.endless) for one in list(self._current)]
        return sorted(waits, key=lambda one: -one.seconds)

    def picture(self) -> str:
        """One line: every wait that lasts at this moment, longest first; equal ones once."""
        return picture(self.lasting())

    def forgive(self, seconds: float) -> None:
        """The whole process stood still for so long (Ctrl-Z): nobody is to blame for having waited meanwhile."""
        for wait in self._current:
            _silence(wait)
            wait.since += seconds
            waited = self._clock() - wait.since
            self._set_alarms(wait, self._warn_after - waited, self._left(wait, self._clock()))

    def spare(self, seconds: float) -> None:
        """Puts off the second deadline of every wait by `seconds`, in which a process of the run was ready and had no core. How long
        the waits have lasted is not changed, and they are reported at the first deadline as always."""
        for wait in self._current:
            wait.spared += min(seconds, self._clock() - wait.since)

    def overdue(self) -> list[Lasting]:
        """The waits that should have been stopped. May be called from any thread."""
        now = self._clock()
        late = [one for one in list(self._current) if not one.endless and self._left(one, now) < 0]
        return [Lasting(one.owner, one.what, now - one.since) for one in late]

    def _left(self, wait: _Wait, now: float) -> float:
        """Seconds to its second deadline."""
        return self._stop_after + wait.spared - (now - wait.since)

    def _set_alarms(self, wait: _Wait, warn_in: float, stop_in: float) -> None:
        loop = asyncio.get_running_loop()
        if warn_in > 0:
            wait.alarms.append(loop.call_later(warn_in, self._warn, wait))
        if not wait.endless:
            wait.alarms.append(loop.call_later(max(0.0, stop_in), self._stop, wait))

    def _warn(self, wait: _Wait) -> None:
        then = "" if wait.endless else f" (the run stops at {self._stop_after:.0f} s)"
        self._record(Warned(self._clock(), f"{self._seen(wait)}{then}"))
        if wait.endless:
            self._set_alarms(wait, self._warn_after, 0.0)

    def _stop(self, wait: _Wait) -> None:
        """The sentence is of this moment: what is cancelled afterwards looks as if it had never waited."""
        if wait.stopping:
            return
        if wait.spared and (left := self._left(wait, self._clock())) > 0:
            wait.alarms.append(asyncio.get_running_loop().call_later(left, self._stop, wait))
            return
        seen, every = self._seen(wait), self.lasting()
        loop = asyncio.get_running_loop()

        def stop(testimony: Testimony) -> None:
            brief = f" ({testimony.brief})" if testimony.brief else ""
            wait.error = StalledError(f"stopped: {seen}{brief}. All waits: {picture(every)}")
            for line in testimony.lines:
                wait.error.add_note(line)
            wait.timeout.reschedule(loop.time())

        if self.witness is None:
            stop(Testimony(""))
        else:
            wait.stopping = loop.create_task(_heard(self.witness, seen, every, stop))

    def _seen(self, wait: _Wait) -> Lasting:
        return Lasting(wait.owner, wait.what, self._clock() - wait.since, wait.endless)


def picture(waits: Iterable[Lasting]) -> str:
    return "; ".join(sentence for sentence, _ in counted(waits)) or "nobody waits"


def counted(waits: Iterable[Lasting]) -> list[tuple[str, Lasting]]:
    """Waits of one owner for one thing as one sentence, in the given order; each with the first of them."""
    waits = list(waits)
    times = Counter((one.owner, one.what) for one in waits)
    first: dict[tuple[str, str], Lasting] = {}
    for one in waits:
        first.setdefault((one.owner, one.what), one)
    return [(f"{one} (× {times[key]})" if times[key] > 1 else str(one), one) for key, one in first.items()]


def _silence(wait: _Wait) -> None:
    for alarm in wait.alarms:
        alarm.cancel()
    wait.alarms.clear()


async def _heard(witness: Witness, wait: Lasting, every: Sequence[Lasting], stop: Callable[[Testimony], None]) -> None:
    """Whatever happens to the witness, the wait is stopped."""
    try:
        testimony = await witness(wait, every)
    except Exception as error:
        testimony = Testimony("", [f"the picture of this stall could not be taken: {error!r}"])
    stop(testimony)
