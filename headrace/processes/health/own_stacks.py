"""Stacks of this process, taken under the interpreter's lock: no frame changes while it is read, so nothing can crash.

`faulthandler` is used for a process that a fault of native code is about to end, and for no other. It reads the frames of running threads
without that lock, and crashed processes that were suspended and continued, or asked often.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.processes.health.outside import may_be_read_by

VARIABLE = "HEADRACE_STACKS"
"""Environment variable of a worker process with the path of its file."""

HEADER = "(most recent call first):"


# -- a worker answers ---------------------------------------------------------------------------------------------------------


def answer_signals() -> None:
    """Makes a worker process append its stacks to its file on SIGUSR1, and write that of a thread in which native code fails (SIGSEGV,
    SIGFPE, SIGABRT, ...) to its log before it ends. Called at its start, in its main thread.

    The signal wakes a thread through a pipe, to which the interpreter writes wherever the main thread is. That thread needs the
    interpreter's lock. A process that never releases the lock has to be read from outside (`outside.py`).
    """
    may_be_read_by(os.getppid())
    faulthandler.enable(sys.__stderr__ or 2, all_threads=False)
    path = os.environ.get(VARIABLE)
    if not path:
        return
    asked, asks = os.pipe()
    os.set_blocking(asks, False)
    file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 open for good
    threading.Thread(target=_answer, args=(asked, file), name="headrace-stacks", daemon=True).start()
    signal.set_wakeup_fd(asks, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.siginterrupt(signal.SIGUSR1, False)  # system calls in native code must not fail because of the signal


def _answer(asked: int, file: Any) -> None:
    while numbers := os.read(
        asked, 4096
    ):  # the numbers of all signals that have a handler; several at once get one answer
        if signal.SIGUSR1 in numbers:
            with suppress(OSError):  # a full disk: the asking process notices that there is no answer
                file.write("\n".join(dump_lines([threading.get_ident()])) + "\n")
                file.flush()


def dump_lines(leave_out: Sequence[int] = ()) -> list[str]:
    """Returns the stacks of all threads, the main thread last, innermost frames first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda pair: pair[0] == main)
    lines = []
    for ident, frame in found:
        if ident not in leave_out:
            lines += [f"Thread {names.get(ident, ident)} {HEADER}", *dumped(traceback.extract_stack(frame))]
    return lines


def dumped(summary: Sequence[traceback.FrameSummary]) -> list[str]:
    return [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in reversed(summary)]


def main_frames(dump: str) -> list[str]:
    """Returns the frames of the main thread, which is written last: innermost first, without those of the import system."""
    lines = (line.strip() for line in dump.rpartition(HEADER)[2].splitlines())
    return [line for line in lines if line.startswith('File "') and not line.startswith('File "<frozen')]


def innermost(dump: str, frames: int = 3) -> str:
    """Formats the innermost frames: `core.py:12 step < worker.py:40 main`."""
    return " < ".join(_short(line) for line in main_frames(dump)[:frames]) or "no Python code"


def _short(line: str) -> str:
    """Shortens `File "/a/b/core.py", line 12 in step` to `core.py:12 step`."""
    path, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, name = rest.partition(" in ")
    return f"{Path(path).name}:{number} {name}"


# -- this process ---------------------------------------------------------------------------------------------------------------


def thread_lines(leave_out: Sequence[int] = ()) -> list[str]:
    """Returns the stacks of this process's threads with their names, except those with the identities in `leave_out`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident not in leave_out:
            lines += [f"thread {names.get(ident, ident)}", *_frame_lines(frame)]
    return lines


def thread_place(ident: int, frames: int = 3) -> str:
    """Formats the innermost frames of one thread: `reward.py:3 slow < job.py:80 call`."""
    frame = sys._current_frames().get(ident)
    summary = reversed(traceback.extract_stack(frame)[-frames:]) if frame else []
    return " < ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in summary)


def threads_named(prefix: str) -> list[tuple[str, int]]:
    return [(thread.name, thread.ident or 0) for thread in threading.enumerate() if thread.name.startswith(prefix)]


def thread_stack(ident: int) -> list[str]:
    frame = sys._current_frames().get(ident)
    return _frame_lines(frame) if frame else []


def _frame_lines(frame: FrameType) -> list[str]:
    return _lines(traceback.extract_stack(frame))


def _lines(summary: Iterable[traceback.FrameSummary]) -> list[str]:
    return [
        f'  File "{one.filename}", line {one.lineno}, in {one.name}' + (f": {one.line}" if one.line else "")
        for one in summary
    ]


def task_lines(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Returns the tasks of an event loop, each with the chain of what it awaits; equal chains once. May be called from any thread."""
    found: dict[tuple[str, ...], list[str]] = {}
    for task in asyncio.all_tasks(loop):
        chain = tuple(_lines(_awaited(task.get_coro())))
        found.setdefault(chain, []).append(task.get_name())
    lines = []
    for chain, names in sorted(found.items(), key=lambda pair: len(pair[1])):
        more = f" (× {len(names)})" if len(names) > 1 else ""
        lines += [f"task {names[0]}{more}", *chain]
    return lines


def _awaited(coroutine: Any) -> list[traceback.FrameSummary]:
    """Returns the chain of awaited frames, outermost first. `Task.get_stack` returns only the outermost."""
    frames: list[tuple[FrameType, int]] = []
    while coroutine is not None:
        for kind in ("cr", "gi", "ag"):
            if frame := getattr(coroutine, f"{kind}_frame", None):
                frames.append((frame, frame.f_lineno))
        coroutine = next(
            (inner for name in ("cr_await", "gi_yieldfrom", "ag_await") if (inner := getattr(coroutine, name, None))),
            None,
        )
    return list(traceback.StackSummary.extract(iter(frames)))
