"""How a worker answers a call: with the result, or with the exception by name."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.orchestration.workers.wire import Frame, WorkerEnd, name_of


def answer(end: WorkerEnd, frame: Frame, work: Callable[[], Any]) -> None:
    """The user's errors go without a traceback."""
    try:
        result = work()
    except Exception as error:
        fail(end, frame, error)
    else:
        end.reply(frame, result)


def vital(work: Callable[[], None]) -> None:
    """For a thread of a worker process. What ends it ends the process: a worker without it would never answer again."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def fail(end: WorkerEnd, frame: Frame, error: Exception) -> None:
    known = isinstance(error, (HeadraceError, ValueError, OSError))
    end.fail(frame, name_of(error), str(error) if known else "".join(traceback.format_exception(error)))
