"""Chooses the thread of the controller's event loop, and passes Ctrl-C to it.

called from                                  the loop runs in            SIGINT is handled by
-----------                                  ----------------            ------------------
the command line, a script                   the calling thread          the loop
a notebook, or any coroutine (its thread     a thread of its own         the calling thread, if it is the main one;
has a loop already, which is blocked)                                    it wakes the loop
with callbacks, which the caller runs        the same                    the same
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Act = Callable[[], object]
Main = Callable[[Callable[[Act], None]], Coroutine[Any, Any, None]]
"""Its argument is a function that registers a callback, which is called in the loop at every interrupt."""
Errands = SimpleQueue[Act | None]
"""Functions that the calling thread must call while the loop runs in another one. None ends the queue."""


def host(main: Main, errands: Errands | None = None) -> None:
    """Runs `main` to its end in a new event loop, and returns or raises as it does."""
    if errands is None and not _loop_runs_here():
        asyncio.run(main(_on_signal))
    else:
        _Beside(main, SimpleQueue() if errands is None else errands).run()


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` and returns its result. An interrupt cancels it, and raises KeyboardInterrupt here."""
    found: list[T] = []

    async def go(on_interrupt: Callable[[Act], None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        on_interrupt(task.cancel)
        found.append(await work)

    try:
        host(go)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return found[0]


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _on_signal(act: Act) -> None:
    with suppress(NotImplementedError, ValueError, RuntimeError):  # outside the main thread Ctrl-C is the caller's
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, act)


class _Beside:
    """Runs the loop in a thread of its own. The calling thread meanwhile does errands and passes on interrupts."""

    def __init__(self, main: Main, errands: Errands) -> None:
        self._main, self._errands = main, errands
        self._loop: asyncio.AbstractEventLoop | None = None
        self._act: Act | None = None
        self._heard: deque[None] = deque()
        """Interrupts that were not passed to the loop yet, which may not be running."""
        self._interrupts, self._errand = 0, False
        self._error: BaseException | None = None
        inherited = contextvars.copy_context()  # it tells a notebook to which cell the output belongs
        self._thread = threading.Thread(target=inherited.run, args=(self._turn,), name="headrace-loop", daemon=True)

    def run(self) -> None:
        with self._signals():
            self._thread.start()
            with suppress(KeyboardInterrupt):  # raised in an errand that did not end; the loop is ending already
                while errand := self._errands.get():
                    self._do(errand)
            self._thread.join()
        if self._error is not None and self._heard:  # nobody in the loop has heard of it, so the caller has to
            raise KeyboardInterrupt from self._error
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
            asyncio.run(self._main(self._attach))
        except BaseException as error:
            self._error = error
        finally:
            self._loop = None
            self._errands.put(None)

    def _attach(self, act: Act) -> None:
        self._act, self._loop = act, asyncio.get_running_loop()
        self._loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._heard:
            self._heard.popleft()
            if self._act:
                self._act()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)

    def _interrupted(self, number: int, frame: Any) -> None:
        """The signal handler. It may interrupt the calling thread anywhere, so it must take no lock."""
        self._interrupts += 1
        self._heard.append(None)
        if loop := self._loop:
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self._pass_on)
        if self._errand and (self._interrupts > 1 or not self._thread.is_alive()):
            raise KeyboardInterrupt
