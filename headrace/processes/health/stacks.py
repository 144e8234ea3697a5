"""The Python stacks of the worker processes, and their state in the kernel.

A worker is asked by SIGUSR1 and writes its stacks to a file itself (`health/own_stacks.py`). If it does not answer, because native code
keeps its interpreter's lock or because it is stopped, it is read from outside (`health/outside.py`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.processes.health.family import Child
from headrace.processes.health.outside import stacks_from_outside
from headrace.processes.health.own_stacks import innermost, main_frames
from headrace.processes.health.patience import Patience

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
    before = {child: (_size(child.stacks), _processor_seconds(child.pid)) for child in asked}
    sent = {child for child in asked if _may_be_asked(child)}
    for child in sent:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGUSR1)
    sizes: dict[Child, int] = {}
    left = [Patience(child.pid, patience) for child in asked]
    while any(one.left > 0 for one in left):
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
    state, after = process_state(child.pid), _processor_seconds(child.pid)
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
