"""Named waits (C6): every wait has an owner, a name and deadlines, so that nothing hangs unnoticed.

A call to a process has the same second deadline (`Waits.answer`). It is what others wait for, so it passes judgement first: a process
that does not answer counts as dead, and no wait is stopped before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import HeadraceError, StalledError, WorkerDied
from headrace.core.types import Struct
from headrace.facts.facts import Fact, Waited, Warned, Withdrawn

AFTER_ANSWERS = 1.0
"""Seconds that a wait has beyond the deadline of a call that is under way: the call is judged first."""

WORTH_RECORDING = 0.01
"""Seconds. Shorter waits are no stalls, and recording them would take longer than they last."""


class Lasting(Struct, frozen=True):
    """A wait that is not over."""

    owner: str
    what: str
    seconds: float
    endless: bool = False
    """Whether it has no second deadline."""

    def __str__(self) -> str:
        return f"{self.owner} has waited {self.seconds:.0f} s for {self.what}"


@dataclass(frozen=True)
class Testimony:
    """The result of inspecting the processes when a wait is stopped: the cause in a few words, and all details in many lines."""

    brief: str
    lines: Sequence[str] = ()


Witness = Callable[[Lasting, Sequence[Lasting]], Awaitable[Testimony]]
"""Called before a wait is stopped, while the cause is still there, with the wait and all current waits."""


@dataclass(eq=False, kw_only=True)
class _Wait:
    owner: str
    what: str
    since: float
    timeout: asyncio.Timeout
    endless: bool = False
    advances: Callable[[], object] | None = None
    allows: float = 0.0
    seen: object = None
    """The value that `advances` returned last."""
    spared: float = 0.0
    """Seconds by which its second deadline is put off."""
    alarms: list[asyncio.TimerHandle] = field(default_factory=list)
    told: bool = False
    """Whether it was counted in the newest warning."""
    warned: bool = False
    """Whether it was counted in any."""
    stopping: asyncio.Task[None] | None = None
    error: Exception | None = None
    """Ends it."""
    who: str = ""
    """The process that was called. Whoever calls it has a named wait beside, which is the one that people see."""


class Waits:
    """The current waits of a run: what waits for what, and since when. A wait is reported after `warn_after` seconds and ends the run
    after `stop_after`."""

    def __init__(
        self, record: Callable[[Fact], None], clock: Callable[[], float], warn_after: float, stop_after: float
    ) -> None:
        self._record, self._clock = record, clock
        self._warn_after, self._stop_after = warn_after, stop_after
        self._current: dict[_Wait, None] = {}
        self.witness: Witness | None = None

    @contextlib.asynccontextmanager
    async def named(
        self,
        owner: str,
        what: str,
        endless: bool = False,
        *,
        advances: Callable[[], object] | None = None,
        allows: float = 0.0,
    ) -> AsyncIterator[None]:
        """Names a wait: `async with waits.named("trainer", "8 scored groups"): ...`. Raises `StalledError` at the second deadline.

        `endless`: a wait without a known bound, such as a download. It is reported every `warn_after` seconds and never stopped.
        `advances`: returns what changes as long as the awaited work goes on, such as a number of tokens. It is asked at both deadlines, so that a wait
        that ends before costs nothing: if it has changed since it was asked last, the wait has another `stop_after` seconds. `allows`: seconds that
        one piece of that work may take, beside.
        """
        wait = _Wait(
            owner=owner,
            what=what,
            since=self._clock(),
            timeout=asyncio.timeout(None),
            endless=endless,
            advances=advances,
            allows=allows,
            spared=allows,
        )
        try:
            async with self._held(wait):
                yield
        finally:
            if (seconds := self._clock() - wait.since) >= WORTH_RECORDING:
                self._record(Waited(self._clock(), owner, what, seconds))

    @contextlib.asynccontextmanager
    async def answer(self, who: str, call: str, owner: str = "controller") -> AsyncIterator[None]:
        """Waits for the answer of a process to a call. If there is none at the second deadline, the process hangs and counts as dead:
        raises `WorkerDied`, with what is known of it. Until then no other wait is stopped, because all wait for it in the end.

        `owner`: as for `named`, for the time in which files are read."""
        async with self._held(
            _Wait(owner=owner, what=call, since=self._clock(), timeout=asyncio.timeout(None), who=who)
        ):
            yield

    @contextlib.asynccontextmanager
    async def _held(self, wait: _Wait) -> AsyncIterator[None]:
        """Holds its body to the deadlines of a wait."""
        self._current[wait] = None
        self._set_alarms(wait, self._warn_after, self._stop_after + wait.allows)
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
            self._withdraw(wait)
            if wait.stopping:
                wait.stopping.cancel()

    def lasting(self) -> list[Lasting]:
        """Returns the current waits, longest first. May be called from any thread."""
        now = self._clock()
        named = [wait for wait in list(self._current) if not wait.who]
        waits = [Lasting(wait.owner, wait.what, now - wait.since, wait.endless) for wait in named]
        return sorted(waits, key=lambda wait: -wait.seconds)

    def picture(self) -> str:
        """Returns one line with all current waits, longest first, equal ones once."""
        return picture(self.lasting())

    def forgive(self, seconds: float) -> None:
        """Extends all deadlines by the seconds for which the whole process was stopped (Ctrl-Z)."""
        for wait in self._current:
            _silence(wait)
            wait.told = False
            wait.since += seconds
            waited = self._clock() - wait.since
            self._set_alarms(wait, self._warn_after - waited, self._left(wait, self._clock()))

    def spare(self, seconds: float, owner: str = "") -> None:
        """Puts off the second deadline of every wait, or of those of one owner, by `seconds`, in which a process of the run was ready and had no
        core, or read files. How long the waits have lasted is not changed, and they are reported at the first deadline as always."""
        for wait in self._current:
            if owner in ("", wait.owner):
                wait.spared += min(seconds, self._clock() - wait.since)

    def overdue(self) -> list[Lasting]:
        """The waits that should have been stopped. May be called from any thread."""
        now = self._clock()
        late = [wait for wait in list(self._current) if not wait.endless and self._left(wait, now) < 0]
        return [self._seen(wait) for wait in late]

    def _left(self, wait: _Wait, now: float) -> float:
        """Seconds to its second deadline."""
        return self._stop_after + wait.spared - (now - wait.since)

    def _set_alarms(self, wait: _Wait, warn_in: float, stop_in: float) -> None:
        loop = asyncio.get_running_loop()
        if warn_in > 0 and not wait.who:
            wait.alarms.append(loop.call_later(warn_in, self._warn, wait))
        if not wait.endless:
            wait.alarms.append(loop.call_later(max(0.0, stop_in), self._stop, wait))

    def _warn(self, wait: _Wait) -> None:
        wait.seen = wait.advances and wait.advances()
        try:
            self._tell(wait)
        except Exception as error:  # a full disk; whoever waits is the only one who can hear of it
            wait.error = error
            wait.timeout.reschedule(asyncio.get_running_loop().time())
            return
        if wait.endless:
            wait.told = False
            self._set_alarms(wait, self._warn_after, 0.0)

    def _tell(self, wait: _Wait) -> None:
        """Warns of a wait and of all like it, unless one of them has. (Hundreds of groups may wait for one thing.)"""
        alike = [other for other in self._current if (other.owner, other.what) == (wait.owner, wait.what)]
        if not wait.endless and any(other.told for other in alike):
            wait.told = wait.warned = True
        if wait.told:
            return
        for other in alike:
            other.told = other.warned = True
        times = f" (× {len(alike)})" if len(alike) > 1 else ""
        then = "" if wait.endless else f" (the run stops at {self._stop_after:.0f} s)"
        self._record(Warned(self._clock(), f"{self._seen(wait)}{times}{then}", _key(wait)))

    def _withdraw(self, wait: _Wait) -> None:
        """Takes back what was told of a wait, with the last one of its kind that was told of."""
        told = wait.warned and not wait.stopping and wait.error is None
        if told and not any(_key(other) == _key(wait) and other.warned for other in self._current):
            with contextlib.suppress(HeadraceError):  # a full disk; whoever records next hears of it
                self._record(Withdrawn(self._clock(), _key(wait)))

    def _stop(self, wait: _Wait) -> None:
        """Stops a wait. The list of waits is taken first, because those that are cancelled afterwards would be missing from it."""
        if wait.stopping:
            return
        now = self._clock()
        if wait.advances and self._left(wait, now) <= 0 and (seen := wait.advances()) != wait.seen:
            wait.seen, wait.spared = seen, now - wait.since + wait.allows
        if (
            not wait.who
            and (calls := [call for call in self._current if call.who])
            and (late := -self._left(wait, now)) >= 0
        ):
            wait.spared += late + max(0.0, *(self._left(call, now) for call in calls)) + AFTER_ANSWERS
        if wait.spared and (left := self._left(wait, now)) > 0:
            wait.alarms.append(asyncio.get_running_loop().call_later(left, self._stop, wait))
            return
        seen, every = self._seen(wait), self.lasting()
        loop = asyncio.get_running_loop()

        def stop(testimony: Testimony) -> None:
            brief = f" ({testimony.brief})" if testimony.brief else ""
            if wait.who:
                wait.error = WorkerDied(wait.who, _hangs(wait.what, seen.seconds, testimony))
            else:
                wait.error = StalledError(f"stopped: {seen}{brief}. All waits: {picture(every)}")
            for line in testimony.lines:
                wait.error.add_note(line)
            wait.timeout.reschedule(loop.time())

        if self.witness is None:
            stop(Testimony(""))
        else:
            wait.stopping = loop.create_task(_heard(self.witness, seen, every, stop))

    def _seen(self, wait: _Wait) -> Lasting:
        what = f"the {wait.who} ({wait.what})" if wait.who else wait.what
        return Lasting(wait.owner, what, self._clock() - wait.since, wait.endless)


def _hangs(call: str, seconds: float, testimony: Testimony) -> str:
    known = "; ".join(
        [*filter(None, [testimony.brief]), *testimony.lines[-1:]]
    )  # the last line says where all stacks are
    message = f"hangs: no answer to {call} for {seconds:.0f} s{f' ({known})' if known else ''}"
    return f"{message}. If it can take that long, raise watch.stop_after"


def picture(waits: Iterable[Lasting]) -> str:
    return "; ".join(sentence for sentence, _ in counted(waits)) or "nothing waits"


def counted(waits: Iterable[Lasting]) -> list[tuple[str, Lasting]]:
    """Returns one sentence for all waits of one owner for one thing, in the given order, each with the first of these waits."""
    waits = list(waits)
    times = Counter((wait.owner, wait.what) for wait in waits)
    first: dict[tuple[str, str], Lasting] = {}
    for wait in waits:
        first.setdefault((wait.owner, wait.what), wait)
    return [(f"{wait} (× {times[key]})" if times[key] > 1 else str(wait), wait) for key, wait in first.items()]


BETWEEN = " waits for "


def _key(wait: _Wait) -> str:
    return f"{wait.owner}{BETWEEN}{wait.what}"


def is_wait(key: str) -> bool:
    """Returns whether the key of a warning is that of a wait."""
    return BETWEEN in key


def _silence(wait: _Wait) -> None:
    for alarm in wait.alarms:
        alarm.cancel()
    wait.alarms.clear()


async def _heard(witness: Witness, wait: Lasting, every: Sequence[Lasting], stop: Callable[[Testimony], None]) -> None:
    """Stops the wait with the witness's testimony, or without it if the witness fails."""
    try:
        testimony = await witness(wait, every)
    except Exception as error:
        testimony = Testimony("", [f"the snapshot of this stall could not be taken: {error!r}"])
    stop(testimony)
