"""In which thread the controller's event loop runs, and how Ctrl-C reaches it.

called from                                  the loop runs in            SIGINT is heard by
-----------                                  ----------------            ------------------
the command line, a script                   the calling thread          the loop
a notebook, or any coroutine (its thread     a thread of its own         the calling thread, if it is the main one;
has a loop already, which stands still)                                  it wakes the loop
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
"""Is given a function: whatever is passed to that is called in the loop at every interrupt."""
Errands = SimpleQueue[Act | None]
"""What the calling thread has to call while the loop runs elsewhere; None where nothing more will come."""


def host(main: Main, errands: Errands | None = None) -> None:
    """Runs `main` to its end in an event loop of its own, and returns or raises as it does."""
    if errands is None and not _loop_runs_here():
        asyncio.run(main(_on_signal))
    else:
        _Beside(main, SimpleQueue() if errands is None else errands).run()


def complete(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. An interrupt cancels it, and is a KeyboardInterrupt here."""
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
    """A thread for the loop, and what the calling thread does meanwhile: errands, and passing on interrupts."""

    def __init__(self, main: Main, errands: Errands) -> None:
        self._main, self._errands = main, errands
        self._loop: asyncio.AbstractEventLoop | None = None
        self._act: Act | None = None
        self._heard: deque[None] = deque()
        """Interrupts that the loop has not been told of: it may not run yet."""
        self._interrupts, self._errand = 0, False
        self._error: BaseException | None = None
        inherited = contextvars.copy_context()  # a notebook knows by it to which cell output belongs
        self._thread = threading.Thread(target=inherited.run, args=(self._turn,), name="headrace-loop", daemon=True)

    def run(self) -> None:
        with self._signals():
            self._thread.start()
            with suppress(KeyboardInterrupt):  # in an errand that did not end: the loop is leaving already
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
            asyncio.run(self._main(self._attach))
        except BaseException as error:
            self._error = error
        finally:
            self._loop = None
            self._errands.put(None)

    def _attach(self, act: Act) -> None:
        self._act, self._loop = act, asyncio.get_running_loop()
        self._loop.call_soon(self._tell)

    def _tell(self) -> None:
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
        """Any bytecode of the calling thread may lie beneath this: it takes no lock."""
        self._interrupts += 1
        self._heard.append(None)
        if loop := self._loop:
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self._tell)
        if self._errand and (self._interrupts > 1 or not self._thread.is_alive()):
            raise KeyboardInterrupt
