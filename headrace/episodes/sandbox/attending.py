"""Waits for the processes of one call, reads what they print, watches their private directory, ends those that exceed a limit, and says how they ended."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from headrace.episodes.sandbox.inside.solution import CONFINED, MEMORY, RAISED
from headrace.episodes.sandbox.kernel.seccomp import ThreadGate
from headrace.episodes.sandbox.kernel.syscalls import mount_private, unmount
from headrace.episodes.sandbox.sandbox_limits import SandboxLimits
from headrace.processes.frames import StreamEnded
from headrace.processes.health.owned_directory import remove_all
from headrace.processes.health.patience import Patience


class PrivateDirectory:
    """A directory that is empty at the start of each call. Every call of a process that makes calls has the same path."""

    def __init__(self, path: str, limits: SandboxLimits, *, in_memory: bool) -> None:
        self.path, self._limits, self._in_memory = path, limits, in_memory

    @contextmanager
    def fresh(self) -> Iterator[None]:
        os.mkdir(self.path, 0o700)
        try:
            if self._in_memory:
                mount_private(self.path, self._limits.disk, self._limits.files)
            try:
                yield
            finally:
                if self._in_memory:
                    unmount(self.path)
        finally:
            remove_all(self.path)

    def overfull(self) -> str:
        """Returns what there is too much of. In memory the kernel refuses it; on the disk this is looked at while the call runs."""
        if self._in_memory:
            return ""
        files = size = 0
        try:
            for found in _files(self.path):
                files, size = files + 1, size + found
                if files > self._limits.files:
                    return f"more than {self._limits.files} files"
                if size > self._limits.disk:
                    return f"more than {self._limits.disk:,} bytes of files"
        except PermissionError:
            return "a directory that nobody can look into, which may have any number of files"
        except RecursionError:
            return "directories within each other without end"
        return ""


def _files(path: str) -> Iterator[int]:
    """Yields the size on the disk of each file and directory below, one at a time: there may be very many."""
    try:
        with os.scandir(path) as found:
            for entry in found:
                yield entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
    except PermissionError:
        raise
    except OSError:  # removed meanwhile
        return


_LOOK = 0.05
"""Seconds between two looks at the private directory and at the deadline."""


class Forked(NamedTuple):
    """A process of a call."""

    pid: int
    gate: ThreadGate


class CallEnd(NamedTuple):
    """The end of a call."""

    broken: tuple[str, str]
    """The limit for which it was ended, and the detail."""
    status: int
    """The code's, as `os.waitstatus_to_exitcode` returns it."""
    cpu_seconds: float
    """All processes of the call."""
    code_cpu_seconds: float
    printed: list[bytes]
    """Standard output, standard error and, for a test, the verdict."""
    test_status: int = 0
    """The test's, if the code has another process."""


def pipes(count: int) -> tuple[list[int], list[int]]:
    """Returns the reading ends, which do not block, and the writing ends."""
    made = [os.pipe() for _ in range(count)]
    for reading, _ in made:
        os.set_blocking(reading, False)
    return [read_end for read_end, _ in made], [write_end for _, write_end in made]


def attend(
    first: Forked, code: Forked, reading: list[int], *, limits: SandboxLimits, private: PrivateDirectory, orders: int
) -> CallEnd:
    """Returns when `first` has ended, or was killed with `code` for exceeding a limit. `code`: the process that runs the code, perhaps the
    same. `orders`: at its end nobody waits for the call; raises StreamEnded then, with the processes killed."""
    patience = Patience(code.pid, limits.seconds)
    printed, most = {end: bytearray() for end in reading}, limits.output + len(CONFINED)
    watch = select.poll()
    for end in reading:
        watch.register(end, select.POLLIN)
    watch.register(orders, 0)  # reports the end only
    gates = {process.gate.fileno(): process.gate for process in {first, code}}
    for gate in gates:
        watch.register(gate, select.POLLIN)
    handle = os.pidfd_open(first.pid) if hasattr(os, "pidfd_open") else -1
    if handle >= 0:
        watch.register(handle, select.POLLIN)
    step = _LOOK if handle >= 0 else 0.005
    broken = ("", "")
    ended: tuple[int, float] | None = None
    while not broken[0] and not (ended := _end(first.pid, os.WNOHANG)):
        for found, event in watch.poll(1000 * max(min(patience.left, step), 0.001)):
            if found == orders and event & select.POLLHUP:
                for process in {first, code}:
                    os.kill(process.pid, signal.SIGKILL)
                raise StreamEnded("nobody waits for the call")
            if found in printed and not _read(found, printed[found], most):
                watch.unregister(found)
            if found in gates:
                _serve(gates, found, event, watch)
        broken = _broken(patience, printed, limits, private)
    if handle >= 0:
        os.close(handle)
    ends = {process: ended if process == first and ended else _killed(process.pid) for process in {first, code}}
    for process in ends:
        process.gate.close()
    for end in reading:
        _read(end, printed[end], most)
        os.close(end)
    broken = broken if broken[0] else _broken(None, printed, limits, private)
    status, cpu = ends[code]
    return CallEnd(
        broken,
        status,
        cpu_seconds=sum(used for _, used in ends.values()),
        code_cpu_seconds=cpu,
        printed=[bytes(output) for output in printed.values()],
        test_status=ends[first][0] if first != code else 0,
    )


def _serve(gates: dict[int, ThreadGate], found: int, event: int, watch: select.poll) -> None:
    """Does what there is to do at the gate, and watches it where it is then."""
    gate = gates[found]
    more = bool(event & select.POLLIN) and gate.turn()
    if more and gate.fileno() == found:
        return
    watch.unregister(found)
    del gates[found]
    if more:
        gates[gate.fileno()] = gate
        watch.register(gate, select.POLLIN)


def _broken(
    patience: Patience | None, printed: dict[int, bytearray], limits: SandboxLimits, private: PrivateDirectory
) -> tuple[str, str]:
    out, *others = printed.values()
    if max(len(out.removeprefix(CONFINED)), *map(len, others)) > limits.output:
        return "output", f"it printed more than {limits.output:,} bytes"
    if patience and patience.left < 0:
        return "time", f"it took more than {limits.seconds:g} s"
    if much := private.overfull():
        return "disk", f"it wrote {much}"
    return "", ""


def _end(pid: int, flags: int = 0) -> tuple[int, float] | None:
    """Returns how the process ended, and the seconds of CPU time that it used; None if it runs. Not with `waitid`, which macOS lacks."""
    found, status, usage = os.wait4(pid, flags)
    return (os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime) if found else None


def _read(descriptor: int, into: bytearray, most: int) -> bool:
    """Reads what is there, up to one byte more than `most`. Returns whether more may come."""
    while len(into) <= most:
        try:
            part = os.read(descriptor, min(most + 1 - len(into), 1 << 16))
        except BlockingIOError:
            return True
        if not part:
            return False
        into += part
    return False


def _killed(pid: int) -> tuple[int, float]:
    """Returns how the process ended, by this signal or before it."""
    os.kill(pid, signal.SIGKILL)  # it has not been waited for, so the number is still its own
    end = _end(pid)
    assert end
    return end


def report_of(ended: CallEnd, limits: SandboxLimits) -> dict[str, Any]:
    """Returns the fields of `sandbox.SandboxResult` as `result`, and whether the verdict of a test is `sure` (`inside/tester.py`)."""
    printed = [ended.printed[0].removeprefix(CONFINED), *ended.printed[1:]]
    out, err, *verdict = [text[: limits.output].decode(errors="replace") for text in printed]
    reason, detail = ended.broken
    sure = False
    if blame := _own_limits(ended, limits, verdict):
        reason, detail = "unsupported", blame
    elif not reason and verdict:
        reason, detail, *more = json.loads(verdict[0] or '["ended", "the test ended without a verdict"]')
        sure = any(more)
    if not ended.printed[0].startswith(CONFINED) and not _needless(ended, verdict, reason):
        reason, detail = "unconfined", err.strip()[-500:] or detail
    if reason == "ended" or (not reason and not verdict):
        reason, detail = _how(ended, limits, err, detail)
    result = {"reason": reason, "detail": detail, "out": out, "err": err, "cpu_seconds": ended.cpu_seconds}
    return {"result": result, "sure": sure}


def _own_limits(ended: CallEnd, limits: SandboxLimits, verdict: list[str]) -> str:
    """Returns which limit the test itself has exceeded, in a process of its own; empty if none."""
    used = ended.cpu_seconds - ended.code_cpu_seconds
    if ended.broken[0] == "time" and verdict and used > max(ended.code_cpu_seconds, limits.seconds / 2):
        return f"the test itself took more than {limits.seconds:g} s"
    if not ended.broken[0] and ended.test_status < 0 and not verdict[0]:
        spent = used > 0.8 * limits.cpu_seconds
        return (
            f"the test itself took more than {limits.cpu_seconds} s of CPU time"
            if spent
            else f"the test itself was killed by {signal.Signals(-ended.test_status).name}"
        )
    return ""


def _needless(ended: CallEnd, verdict: list[str], reason: str) -> bool:
    """Returns whether the code was killed because a test that asked it nothing was over, perhaps before the code was confined. A test
    that asked would have waited for an answer, or for the end of the code."""
    return bool(verdict) and not ended.broken[0] and reason != "ended" and ended.status == -signal.SIGKILL


def _how(ended: CallEnd, limits: SandboxLimits, err: str, detail: str) -> tuple[str, str]:
    """Returns why the code ended. `detail`: what the test says of it, if there is one, and the code should not have ended."""
    last = (err.strip().splitlines() or [""])[-1][:500]
    if ended.status < 0:
        # The kernel ends it by a clock that counts ticks: on a machine that is shared, it has computed for less when that is over.
        if ended.code_cpu_seconds > 0.5 * limits.cpu_seconds:
            return "cpu", f"it took more than {limits.cpu_seconds} s of CPU time"
        return "died", detail or f"it was killed by {signal.Signals(-ended.status).name}"
    match ended.status:
        case 0 if not detail:
            return "", ""
        case code if code == RAISED:
            return "raised", last or "it raised, and nothing could be printed"
        case code if code == MEMORY:
            return "memory", f"it used more than {limits.memory >> 20:,} MiB of memory"
    return "exit", f"it ended with exit code {ended.status}{' before it answered' if detail else ''}"
