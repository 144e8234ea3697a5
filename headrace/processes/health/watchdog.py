"""A thread beside the event loop. It notices what the loop cannot: that the loop itself is blocked. It reports where all processes are.

fault                                          noticed by                          consequence
-----                                          ----------                          -----------
a named wait lasts too long                    the loop (`Waits`)                  warning; the run stops, with a snapshot
the loop does not turn (code that blocks it)   this thread: no pulse               warning; the process ends, with a snapshot
a wait that was stopped does not end           this thread                         the process ends, with a snapshot
tasks wait, and none of them by name           this thread: no named wait          warning; the process ends, with a snapshot
native code keeps the interpreter's lock       another process, `health/monitor`   warning with stacks; the process is killed
a user sends kill -USR1                        a signal handler, then this thread  a snapshot; the run goes on
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.printing import echo, echo_traceback
from headrace.facts.facts import RunEnded, RunStarted, Warned, WorkerLost
from headrace.facts.waits import Lasting, Testimony, Waits, picture
from headrace.processes.health import stacks
from headrace.processes.health.family import Family, family
from headrace.processes.health.live_status import Camera, LiveStatus, blame, write_live
from headrace.processes.health.monitor import Monitor
from headrace.processes.health.patience import Reading, Starvation

STALLED = 3
"""Exit code of a process that its watchdog ended."""

PULSE = 1.0
"""Seconds between two signs of life of the event loop, and between two checks of the thread."""

WRITE_EVERY = 2.0
"""Seconds between two writes of `status.json`."""
LAST_GRACE = 60.0
"""Seconds in which a stopped wait has to end."""

WORTH_SPARING = 0.05
"""Seconds for a core within one pulse. Every machine makes processes wait a little."""

FREEZE = 10.0
"""Seconds of delay of a pulse from which, if this thread is equally late, the whole process counts as having been stopped (Ctrl-Z)."""


class Watchdog:
    """A context around `asyncio.run`, in which `attach` starts watching the loop. It is also a sink, so that warnings reach
    `status.json` at once."""

    def __init__(
        self,
        logs: Path,
        *,
        warn_after: float,
        stop_after: float,
        pulse: float = PULSE,
        freeze: float = FREEZE,
        leave: Callable[[int], Any] = os._exit,
        writes: bool = True,
    ) -> None:
        """`leave` ends the process at once, whatever blocks it. `writes`: whether to write `status.json` from the beginning, rather than
        only once the run has started; until then the file of an earlier process is kept."""
        self._writes = writes
        self._warn_after, self._stop_after, self._every = warn_after, stop_after, pulse
        self._freeze, self._leave = freeze, leave
        self._places: dict[Path, list[Waits]] = {}
        self.family = Family()
        """The processes that are started within the context."""
        self._camera = Camera(logs, self.family, self._lasting)
        self._monitor = Monitor(logs / "interpreter.stacks", warn_after, stop_after)
        self._starvation, self._reading = Starvation(), Reading()
        self._asked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._beats = self._seen = 0
        self._lived = 0.0
        """Seconds that this thread has run, without those in which the whole process was stopped."""
        self._passed = self._silent = self._nameless = self._overdue = self._written = 0.0
        self._verdict = ""
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headrace-watchdog", daemon=True)
        self._undo = ExitStack()

    # -- in the event loop -----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Starts watching the running loop."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._camera.loop = self._loop
        self._pulse(self._loop.time(), self._lived)

    def add(self, path: Path, waits: Waits) -> None:
        """Adds the waits of the run in `path`, whose `status.json` lists them. Waits of several runs are added to each of them."""
        waits.witness = self._testify
        self._places.setdefault(path, []).append(waits)

    def _pulse(self, due: float, lived: float) -> None:
        assert self._loop is not None
        self._beats += 1
        late = self._loop.time() - due - (self._lived - lived)
        if late > self._freeze:
            for waits in self._waits():
                waits.forgive(late)
        pids, passed = [os.getpid(), *(child.pid for child in self.family.children())], self._every + max(0.0, late)
        starved, reads = self._starvation.since_last(pids), self._reading.since_last(pids)
        for waits in self._waits():
            if starved > WORTH_SPARING:
                waits.spare(min(starved, passed))
            if reads:
                waits.spare(passed, owner="start")
        due = self._loop.time() + self._every
        self._loop.call_at(due, self._pulse, due, self._lived)

    async def _testify(self, wait: Lasting, every: Sequence[Lasting]) -> Testimony:
        """Takes a snapshot for a wait that is about to be stopped."""
        taken = await asyncio.to_thread(self._camera.take, str(wait))
        brief, lines = blame(wait, every, taken.accounts)
        return Testimony(brief, [*lines, f"the stacks of all processes are in {taken.path}"])

    # -- a sink ----------------------------------------------------------------------------------------------------------

    def record(self, fact: Any, state: Any) -> None:
        if isinstance(fact, (Warned, WorkerLost, RunStarted, RunEnded)):
            self._writes = self._writes or isinstance(fact, RunStarted)
            self._wake.set()

    def close(self) -> None:
        """Does nothing: the thread ends with the context, not with a recorder."""

    # -- the thread ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Watchdog:
        self._undo.enter_context(family(self.family))
        self._undo.enter_context(self._monitor)
        self._answer_signals()
        self._thread.start()
        return self

    def _answer_signals(self) -> None:
        """Lets SIGUSR1 ask for a snapshot. The thread takes it, because the code that a handler interrupts may hold any lock."""
        before = signal.getsignal(signal.SIGUSR1)

        def asked(number: int, frame: Any) -> None:
            self._asked = True
            if callable(before):  # a handler that the user has set is called as well
                before(number, frame)

        with suppress(ValueError):  # handlers can be set in the main thread only; elsewhere the signal is not supported
            signal.signal(signal.SIGUSR1, asked)
            self._undo.callback(signal.signal, signal.SIGUSR1, before)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._wake.set()
        self._thread.join()
        self._undo.close()
        self._write()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            woken = self._wake.wait(self._every)
            self._wake.clear()
            now = time.monotonic()
            passed, last = min(now - last, 2 * self._every), now
            self._lived += passed
            try:
                self._turn(passed, woken)
            except Exception:  # nothing watches the watchdog, so no error may end it
                with suppress(Exception):
                    echo_traceback()

    def _turn(self, passed: float, woken: bool) -> None:
        self._monitor.beat(list(self._places))
        if self._loop is not None:
            self._check(passed)
        if self._asked:
            self._asked = False
            self._tell(f"asked by a signal. {picture(self._lasting())}")
        if woken or time.monotonic() - self._written >= WRITE_EVERY:
            self._write()

    def _check(self, passed: float) -> None:
        every, turned = self._lasting(), self._beats != self._seen
        self._seen, self._passed = self._beats, passed
        self._silent = 0.0 if turned else self._silent + passed
        self._nameless = 0.0 if every or not turned else self._nameless + passed
        late = [wait for waits in self._waits() for wait in waits.overdue()]
        self._overdue = self._overdue + passed if late else 0.0
        self._judge(self._silent, self._blocked)
        self._judge(self._nameless, self._unnamed)
        if self._overdue > LAST_GRACE:
            self._end(f"a stopped wait does not end: {late[0]}")

    def _blocked(self) -> list[str]:
        place = stacks.thread_place(self._loop_thread)
        message = f"the event loop has not turned for {self._silent:.0f} s: blocked in {place}"
        return [message, *stacks.thread_stack(self._loop_thread)[-stacks.SHORT :]]

    def _unnamed(self) -> list[str]:
        message = f"there has been no named wait for {self._nameless:.0f} s, and the run is not over"
        return [message, *(stacks.task_lines(self._loop) if self._loop else [])]

    def _judge(self, seconds: float, seen: Callable[[], list[str]]) -> None:
        """Warns or ends the process. Called once per turn for each fault, so that a lasting fault is reported in exactly one turn."""
        if seconds >= self._stop_after:
            self._end(seen()[0])
        elif seconds >= self._warn_after > seconds - self._passed:
            message, *shown = seen()
            taken = self._camera.take(message)
            when = f"(the process ends at {self._stop_after:.0f} s; the stacks of all processes are in {taken.path})"
            _print([f"headrace: {message}", *shown, when])

    def _end(self, verdict: str) -> None:
        """Ends the process, because the loop cannot end the run. A resumed run continues from the last checkpoint."""
        self._verdict = f"ended by its watchdog: {verdict}"
        try:
            self._tell(self._verdict)
            self._write()
            for child in self.family.children():
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        finally:
            self._leave(STALLED)

    def _tell(self, why: str) -> None:
        taken = self._camera.take(why)
        _print([*taken.lines, f"(this is kept in {taken.path})"])

    def _lasting(self) -> list[Lasting]:
        return _longest_first(self._waits())

    def _waits(self) -> list[Waits]:
        return list(dict.fromkeys(held for waits in list(self._places.values()) for held in list(waits)))

    def _write(self) -> None:
        self._written = time.monotonic()
        workers = {child.who: child.pid for child in self.family.children()}
        last = str(self._camera.last.path) if self._camera.last else ""
        for path, waits in list(self._places.items()) if self._writes else ():
            every = tuple(_longest_first(list(waits)))
            with suppress(OSError, HeadraceError):  # the recorder reports a full disk
                write_live(
                    path,
                    LiveStatus(
                        pid=os.getpid(),
                        written=time.time(),
                        waits=every,
                        silent=self._silent,
                        workers=workers,
                        verdict=self._verdict,
                        picture=last,
                    ),
                )


def _longest_first(waits: Sequence[Waits]) -> list[Lasting]:
    return sorted((wait for each in waits for wait in each.lasting()), key=lambda wait: -wait.seconds)


def _print(lines: Sequence[str]) -> None:
    echo("\n".join(lines), err=True)
