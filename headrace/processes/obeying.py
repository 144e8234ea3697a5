"""The inside of a process that is asked over its pipes (`asked_process.py`). No event loop is loaded here: plain functions need none, and it is
half of what such a process loads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from headrace.core.printing import echo_traceback, guard_streams
from headrace.processes.frames import StreamEnded
from headrace.processes.process_end import signal_group

if TYPE_CHECKING:
    import asyncio


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns the standard input and output, for frames. From then on what the user's code prints goes to standard error, where no
    terminal obeys it, and its standard input is empty."""
    orders, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    guard_streams()
    return orders, reports


class FrameSender:
    """Writes frames from any thread of the process that made it. A fork of it that a function of the user has made, and that comes back to us
    (its `exec` has failed, say), would answer in place of the function: it ends instead."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._one, self._pid = stream, threading.Lock(), os.getpid()

    def send(self, frame: bytes) -> None:
        if os.getpid() != self._pid:
            os._exit(1)
        with self._one:
            self._stream.write(frame)
            self._stream.flush()


def obey_until_end(read: Callable[[], Any], obey: Callable[[Any], object]) -> None:
    """Starts a thread that reads frames, so that the process ends with its parent whatever the user's function is doing. `read` raises
    StreamEnded at the end of the input. The process ends whenever this thread does: without it, it would wait for frames for ever."""

    def run() -> NoReturn:
        try:
            while True:
                obey(read())
        except StreamEnded:
            pass
        except Exception:
            echo_traceback()
        if os.getpgrp() == os.getpid():  # the leader of a process group, which holds all that the function started
            signal_group(os.getpid())
        os._exit(0)

    threading.Thread(target=run, daemon=True).start()


def run_to_end(loop: asyncio.AbstractEventLoop, awaited: asyncio.Future[Any]) -> None:
    """Runs the loop until `awaited` is done. A KeyboardInterrupt or SystemExit of one of the user's tasks reaches whoever awaits that task, and
    asyncio lets it out of the loop as well: it must not end all other tasks."""
    while not awaited.done():
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_until_complete(awaited)
