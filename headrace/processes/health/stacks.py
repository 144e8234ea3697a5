"""The Python stacks of the worker processes, and their state in the kernel.

A worker is asked by SIGUSR1 and writes its stacks to a file itself (`health/stacks.py`). If it does not answer, because native code
keeps its interpreter's lock or because it is stopped, it is read from outside (`health/stacks.py`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from headrace.processes.health.family import Child
from headrace.processes.health.patience import Patience

if TYPE_CHECKING:  # the monitor has no event loop, and does not load what one needs
    import asyncio

# --- Python stacks of another process
# Python stacks of another process, read with py-spy, even if that process keeps the interpreter's lock or is stopped.
#
# The kernel permits this for a process of the same user that has permitted its reader (`may_be_read_by`), unless the machine forbids it
# altogether. In that case only the kernel's own information about the process is available.


PR_SET_PTRACER = 0x59616D61
"""Linux, prctl(2): sets the process that may read this one, with its descendants, where Yama restricts it."""

SECONDS = 10.0
"""Timeout; reading takes about 20 ms on an idle machine."""


def may_be_read_by(pid: int) -> None:
    """Permits the process `pid` to read this one. If the kernel has no such rule, the call fails and nothing is needed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def stacks_from_outside(pid: int, stopped: bool = False) -> str:
    """Returns the stacks in the format of `stacks.dump_lines`; empty if they cannot be read. Blocks.

    `stopped`: whether the process is stopped by a signal already, so that py-spy need not pause it."""
    tool = _tool()
    if tool is None:
        return ""
    command = [tool, "dump", "--json", *(["--nonblocking"] if stopped else []), "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL, check=True)
        threads = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return "\n".join(line for thread in sorted(threads, key=_is_main) for line in _lines_of_dump(thread))


def _tool() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")  # the environment may not be activated, and so not be on PATH
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _is_main(thread: dict[str, Any]) -> bool:
    return bool(thread["os_thread_id"] == thread["pid"])


def _lines_of_dump(thread: dict[str, Any]) -> list[str]:
    name = thread["thread_name"] or ("MainThread" if _is_main(thread) else thread["os_thread_id"])
    lines = [f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}' for frame in thread["frames"]]
    return [f"Thread {name} (most recent call first):", *lines]


# --- Stacks of this process, taken under the interpreter's lock
# No frame changes while it is read, so nothing can crash.
#
# `faulthandler` is used for a process that a fault of native code is about to end, and for no other. It reads the frames of running threads
# without that lock, and crashed processes that were suspended and continued, or asked often.


VARIABLE = "HEADRACE_STACKS"
"""Environment variable of a worker process with the path of its file."""

HEADER = "(most recent call first):"


# -- a worker answers ---------------------------------------------------------------------------------------------------------


def answer_signals() -> None:
    """Makes a worker process append its stacks to its file on SIGUSR1, and write that of a thread in which native code fails (SIGSEGV,
    SIGFPE, SIGABRT, ...) to its log before it ends. Called at its start, in its main thread.

    The signal wakes a thread through a pipe, to which the interpreter writes wherever the main thread is. That thread needs the
    interpreter's lock. A process that never releases the lock has to be read from outside (`stacks.py`).
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
    return [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in reversed(summary)]


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
    return " < ".join(
        f"{Path(each_frame.filename).name}:{each_frame.lineno} {each_frame.name}" for each_frame in summary
    )


def threads_named(prefix: str) -> list[tuple[str, int]]:
    return [(thread.name, thread.ident or 0) for thread in threading.enumerate() if thread.name.startswith(prefix)]


def thread_stack(ident: int) -> list[str]:
    frame = sys._current_frames().get(ident)
    return _frame_lines(frame) if frame else []


def _frame_lines(frame: FrameType) -> list[str]:
    return _lines(traceback.extract_stack(frame))


def _lines(summary: Iterable[traceback.FrameSummary]) -> list[str]:
    return [
        f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}' + (f": {frame.line}" if frame.line else "")
        for frame in summary
    ]


def task_lines(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Returns the tasks of an event loop, each with the chain of what it awaits; equal chains once. May be called from any thread."""
    import asyncio

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


# --- stacks ------------------------------------------------------------


PATIENCE, SETTLED, POLL = 2.0, 0.3, 0.05
"""Seconds: the time that processes have to answer; the least time for which they are watched, so that their use of a core can be
measured; the interval between two checks."""

SHORT = 20
"""Frames of a stack that are shown on the terminal; the file of the snapshot has all of them."""

STATES = {
    "R": "running",
    "S": "asleep",
    "D": "stuck in the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


@dataclass(frozen=True)
class Account:
    """The result of asking one process."""

    child: Child
    state: str
    """The state in the kernel: `running, 98 % of a core`, `stopped by a signal`."""
    stacks: str
    """Empty if they could not be read; `state` says why, as far as it is known."""

    @property
    def brief(self) -> str:
        """The place of its main thread, or the reason why it is not known, in a few words."""
        who = f"{self.child.who}, pid {self.child.pid}"
        if not self.stacks:
            return f"{who}: {self.state}"
        return f"{who}: {self.state}, in {innermost(self.stacks)}"

    @property
    def lines(self) -> list[str]:
        return [self._title, *self.stacks.splitlines()]

    @property
    def short(self) -> list[str]:
        """The innermost frames of the main thread."""
        return [self._title, *(f"  {frame}" for frame in main_frames(self.stacks)[:SHORT])]

    @property
    def _title(self) -> str:
        return f"--- {self.child.who}, pid {self.child.pid}: {self.state}"


def ask(asked: Iterable[Child], patience: float = PATIENCE) -> list[Account]:
    """Returns the stacks of processes, in the given order. Blocks for `SETTLED` to `patience` seconds, so the event loop's thread must
    not call it."""
    asked, began = list(asked), time.monotonic()
    before = {child: (_size(child.stacks), processor_seconds(child.pid)) for child in asked}
    sent = {child for child in asked if _may_be_asked(child)}
    for child in sent:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
    sizes: dict[Child, int] = {}
    left = [Patience(child.pid, patience) for child in asked]
    while any(rest.left > 0 for rest in left):
        time.sleep(POLL)
        now = {child: _size(child.stacks) for child in sent}
        done = all(now[child] > before[child][0] for child in sent) and now == sizes
        if done and time.monotonic() - began >= SETTLED:
            break
        sizes = now
    passed = time.monotonic() - began
    return [_account(child, child in sent, *before[child], passed) for child in asked]


def _account(child: Child, sent: bool, size: int, used: float | None, passed: float) -> Account:
    text = _read_from(child.stacks, size) if sent else ""
    state, after = process_state(child.pid), processor_seconds(child.pid)
    if text or not is_stopped(child.pid):
        state += f", {100 * (after - used) / passed:.0f} % of a core" if used is not None and after is not None else ""
    if text:
        return Account(child, state, text)
    text = stacks_from_outside(child.pid, is_stopped(child.pid)) if _exists(child.pid) else ""
    if sent:
        return Account(child, f"does not answer signals: {state}", text)
    return Account(child, f"cannot be asked for its stacks (it is just starting, or has none to give): {state}", text)


def is_stopped(pid: int) -> bool:
    """Returns whether the process is stopped by a signal or a debugger."""
    status = _status(pid)
    return status is not None and status.get("State", "?")[:1] in "Tt"


def process_state(pid: int) -> str:
    """Returns the state in the kernel: `asleep`, `stopped by a signal`, `stuck in the kernel (state D, in io_schedule)`, `gone`."""
    status = _status(pid)
    if status is None:
        return "gone" if not _exists(pid) else "in an unknown state"
    letter = status.get("State", "?")[:1]
    words = STATES.get(letter, "in an unknown state")
    if letter not in "DTt":
        return words
    with suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text()
        if place not in ("", "0"):
            return f"{words} (state {letter}, in {place})"
    return f"{words} (state {letter})"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def listens(pid: int) -> bool | None:
    """Returns whether the process has a handler for SIGUSR1; without one the signal would kill it. None if the system does not say."""
    status = _status(pid)
    return bool(int(status.get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1) if status else None


def _may_be_asked(child: Child) -> bool:
    if child.stacks is None:
        return False
    known = listens(child.pid)
    # Without /proc: a worker creates the file right before it sets the handler.
    return child.stacks.exists() and _exists(child.pid) if known is None else known


def _status(pid: int) -> Mapping[str, str] | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def processor_seconds(pid: int) -> float | None:
    """Returns the seconds of a core that a process has used; None if it is gone, or where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0


def _read_from(path: Path | None, start: int) -> str:
    assert path is not None
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
