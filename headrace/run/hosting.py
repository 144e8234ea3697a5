"""Chooses the thread of the controller's event loop, and passes signals to it.

called from                                  the loop runs in            signals are handled by
-----------                                  ----------------            ----------------------
the command line, a script                   the calling thread          the calling thread, if it is the main one;
a notebook, or any coroutine (its thread     a thread of its own         it wakes the loop
has a loop already, which is blocked)
with callbacks, which the caller runs        a thread of its own

SIGINT (Ctrl-C) is handled while a loop runs. SIGTERM, with which Kubernetes, Slurm, systemd and spot machines end a process some time before
they kill it, is handled only within a `Termination`: elsewhere it ends the process at once, as without headrace.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from headrace.core.printing import say, say_from_handler

T = TypeVar("T")
Act = Callable[[], object]
Heed = Callable[[signal.Signals], object]
Main = Callable[[Callable[[Heed], None]], Coroutine[Any, Any, None]]
"""Its argument is a function that registers a callback, which is called in the loop at every signal."""
Errands = SimpleQueue[Act | None]
"""Functions that the calling thread must call while the loop runs in another one. None ends the queue."""


TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM has asked to end."""
LEFT_BEHIND = 5.0
"""Seconds that threads have to end after a signal has ended all else: a download, or the features of images, may take an hour."""


class Termination:
    """Within this context SIGTERM ends a run like Ctrl-C, and at its end the process, with `SystemExit`: whoever sent it wants more than one
    run to end. Outside an event loop it raises `SystemExit` at once. It does nothing where the caller handles SIGTERM, and outside the main
    thread."""

    def __init__(self) -> None:
        self.heard = self._handles = False

    def __enter__(self) -> Termination:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handles = True
            signal.signal(signal.SIGTERM, self.leave)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.heard and (error is None or isinstance(error, KeyboardInterrupt)):
            say("ended by SIGTERM")
            raise SystemExit(TERMINATED) from error

    def leave(self, number: int, frame: Any) -> None:
        """The signal handler where no loop runs."""
        if not self.heard:  # it may be sent to the process, and to its group
            self.heard = True
            say_from_handler("ended by SIGTERM")
            raise SystemExit(TERMINATED)


def run_loop(main: Main, errands: Errands | None = None) -> None:
    """Runs `main` to its end in a new event loop, and returns or raises as it does. If it raises, and a signal came too late for it, raises
    KeyboardInterrupt."""
    signals = _Signals()
    try:
        if runs_here(errands):
            with signals.caught():
                asyncio.run(_left_in_time(main, signals))
        else:
            _Beside(main, SimpleQueue() if errands is None else errands, signals).run()
    except Exception as error:
        if signals.unheard:  # the caller might go on after this error
            raise KeyboardInterrupt from error
        raise


async def _left_in_time(main: Main, signals: _Signals) -> None:
    """Runs `main`. If SIGTERM ends it, and with it the process, threads that are still at work are waited for no longer than `LEFT_BEHIND`."""
    try:
        await main(signals.attach)
    finally:
        if signals.terminated:
            asyncio.get_running_loop().call_later(LEFT_BEHIND, _leave)


def _leave() -> None:
    say("ended by SIGTERM, with a thread still at work")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(TERMINATED)


def runs_here(errands: Errands | None = None) -> bool:
    """Whether `run_loop` would run the loop in the calling thread."""
    return errands is None and not _loop_runs_here()


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` and returns its result. A signal cancels it, and raises KeyboardInterrupt here."""
    found: list[T] = []

    async def go(on_signal: Callable[[Heed], None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        on_signal(lambda number: task.cancel())
        found.append(await work)

    try:
        run_loop(go)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return found[0]


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Signals:
    """Passes the signals of a process to its loop, each once, however early they come."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heed: Heed | None = None
        self.unheard: deque[signal.Signals] = deque()
        """Signals that were not passed to the loop yet, which may not be running."""
        self.count = 0
        self.terminated = False
        """Whether SIGTERM was heard, which ends the process."""

    def attach(self, heed: Heed) -> None:
        """Called in the loop."""
        self._heed, self._loop = heed, asyncio.get_running_loop()
        self._loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self.unheard:
            number = self.unheard.popleft()
            if self._heed:
                self._heed(number)

    @contextmanager
    def caught(self, also: Act = lambda: None) -> Iterator[None]:
        """Catches signals within this context. `also`: called at each, where it interrupted the thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        terminated = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)

        def caught(number: int, frame: Any) -> None:
            """A signal may interrupt this thread anywhere, so its handler must take no lock."""
            if number == signal.SIGTERM and isinstance(terminated, Termination):
                terminated.heard = self.terminated = True
            self.count += number == signal.SIGINT
            self.unheard.append(signal.Signals(number))
            if loop := self._loop:
                with suppress(RuntimeError):  # closed meanwhile
                    loop.call_soon_threadsafe(self._pass_on)
            also()

        heeded = [signal.SIGINT, *([signal.SIGTERM] if isinstance(terminated, Termination) else [])]
        before = [(number, signal.signal(number, caught)) for number in heeded]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, signal.default_int_handler if handler is None else handler)


class _Beside:
    """Runs the loop in a thread of its own. The calling thread meanwhile does errands and passes on signals."""

    def __init__(self, main: Main, errands: Errands, signals: _Signals) -> None:
        self._main, self._errands, self._signals = main, errands, signals
        self._errand = False
        self._error: BaseException | None = None
        inherited = contextvars.copy_context()  # it tells a notebook to which cell the output belongs
        self._thread = threading.Thread(target=inherited.run, args=(self._turn,), name="headrace-loop", daemon=True)

    def run(self) -> None:
        with self._signals.caught(also=self._interrupt_errand):
            self._thread.start()
            with suppress(KeyboardInterrupt):  # raised in an errand that did not end; the loop is ending already
                while errand := self._errands.get():
                    self._do(errand)
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _do(self, errand: Act) -> None:
        self._errand = True
        try:
            errand()
        finally:
            self._errand = False

    def _turn(self) -> None:
        try:
            asyncio.run(self._main(self._signals.attach))
        except BaseException as error:
            self._error = error
        finally:
            self._errands.put(None)

    def _interrupt_errand(self) -> None:
        if self._errand and (self._signals.count > 1 or not self._thread.is_alive()):
            raise KeyboardInterrupt
