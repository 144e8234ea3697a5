"""Where every process stands: Python stacks of the controller's threads and tasks, and of the worker processes.

A worker has `faulthandler` write its stacks to a file on SIGUSR1. The handler is C and needs neither the interpreter's lock nor
its main thread, so that a worker that hangs in native code answers too. One that is stopped, or stuck in the kernel, cannot
answer; then what the kernel says of it is all there is.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "HEADRACE_STACKS"
"""Names the file in the environment of a worker process."""

PATIENCE, SETTLED, POLL = 2.0, 0.3, 0.05
"""Seconds: how long processes get to answer; how long at least they are watched (so that what they use of a processor can be
told); between two looks."""

SHORT = 20
"""Frames of a stack that is shown to a person at once; all of them are in the picture's file."""

STATES = {
    "R": "running",
    "S": "asleep",
    "D": "stuck in the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


def answer_signals() -> None:
    """Called by a worker process at its start."""
    if path := os.environ.get(VARIABLE):
        faulthandler.register(signal.SIGUSR1, file=Path(path).open("a"), all_threads=True)  # noqa: SIM115


# -- worker processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    who: str
    pid: int
    stacks: Path | None
    """Where it writes them; None of one that was started without."""


_children: dict[int, Child] = {}
"""Of this process: like the table of processes that the operating system keeps, there is one."""


def started(who: str, pid: int, stacks: Path | None) -> None:
    _children[pid] = Child(who, pid, stacks)


def ended(pid: int) -> None:
    _children.pop(pid, None)


def children() -> list[Child]:
    return list(_children.values())


@dataclass(frozen=True)
class Account:
    """What became of asking a process."""

    child: Child
    state: str
    """`running, 98 % of a core`, `stopped by a signal`; what the kernel says."""
    stacks: str
    """Empty, when it did not answer; `state` says why as far as it is known."""

    @property
    def brief(self) -> str:
        """In a few words: where its main thread is, or why it does not say."""
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
    """Their stacks, in the given order. Blocks for `SETTLED` to `patience` seconds: not for the event loop's thread."""
    asked, began = list(asked), time.monotonic()
    before = {child: (_size(child.stacks), _processor_seconds(child.pid)) for child in asked}
    sent = {child for child in asked if _may_be_asked(child)}
    for child in sent:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
    sizes: dict[Child, int] = {}
    while time.monotonic() - began < patience:
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
    state = process_state(child.pid)
    after = _processor_seconds(child.pid)
    if text:
        if used is not None and after is not None:
            state += f", {100 * (after - used) / passed:.0f} % of a core"
        return Account(child, state, text)
    if sent:
        return Account(child, f"does not answer signals: {state}", "")
    return Account(child, f"cannot be asked for its stacks (it is just starting, or has none to give): {state}", "")


def process_state(pid: int) -> str:
    """What the kernel says: `asleep`, `stopped by a signal`, `stuck in the kernel (state D, in io_schedule)`, `gone`."""
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
    """Whether it has the handler: without one the signal would end it. None where the system does not say."""
    status = _status(pid)
    return bool(int(status.get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1) if status else None


def _may_be_asked(child: Child) -> bool:
    if child.stacks is None:
        return False
    known = listens(child.pid)
    # Without /proc: the file is made right before the handler is set.
    return child.stacks.exists() and _exists(child.pid) if known is None else known


def _status(pid: int) -> Mapping[str, str] | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _processor_seconds(pid: int) -> float | None:
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


def main_frames(dump: str) -> list[str]:
    """Of faulthandler's text: the main thread, which it writes last; innermost first, without the import system's own."""
    lines = (line.strip() for line in dump.rpartition("(most recent call first):")[2].splitlines())
    return [line for line in lines if line.startswith('File "') and not line.startswith('File "<frozen')]


def innermost(dump: str, frames: int = 3) -> str:
    """`core.py:12 step < worker.py:40 main`."""
    return " < ".join(_short(line) for line in main_frames(dump)[:frames]) or "no Python code"


def _short(line: str) -> str:
    """`File "/a/b/core.py", line 12 in step` -> `core.py:12 step`."""
    path, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, name = rest.partition(" in ")
    return f"{Path(path).name}:{number} {name}"


# -- this process ---------------------------------------------------------------------------------------------------------------


def thread_lines(leave_out: Sequence[int] = ()) -> list[str]:
    """The stacks of this process's threads, by their names; of those with identities `leave_out` none."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident not in leave_out:
            lines += [f"thread {names.get(ident, ident)}", *_frame_lines(frame)]
    return lines


def thread_place(ident: int, frames: int = 3) -> str:
    """`reward.py:3 slow < job.py:80 call`: where one thread is."""
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
    """The tasks of an event loop, each with the chain of what it awaits; equal chains once. From any thread."""
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
    """Outermost first. `Task.get_stack` knows the outermost only."""
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
