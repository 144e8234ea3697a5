"""A worker's reply to a call (the result, or the name and message of the exception), and the end of its start."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.printing import echo_traceback
from headrace.processes.wire import Frame, WorkerEnd, name_of


def answer(end: WorkerEnd, frame: Frame, work: Callable[[], Any]) -> None:
    """Replies with the result of `work`, or with its exception."""
    try:
        result = work()
    except Exception as error:
        fail(end, frame, error)
    else:
        end.reply(frame, result)


def vital(work: Callable[[], None]) -> None:
    """Runs `work` in a thread that the worker cannot do without. When it ends, the process ends too: the worker would never answer
    again."""
    try:
        work()
    except BaseException:
        echo_traceback()
    os._exit(1)


def fail(end: WorkerEnd, frame: Frame, error: Exception) -> None:
    # An error that is ours or the user's needs no traceback.
    known = isinstance(error, (HeadraceError, ValueError, OSError))
    end.fail(frame, name_of(error), str(error) if known else "".join(traceback.format_exception(error)))


def begun() -> None:
    """Garbage is collected from here on, and not among what is there already. Importing torch and transformers makes a million
    objects that stay: looking through them again and again took a fifth of a worker's start (5.3 s of CPU time, now 4.1)."""
    gc.freeze()
    gc.enable()
