"""A process of ours that runs the user's code and can be killed with all that the code started: reward functions, environments."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from headrace.observe.health import orphans
from headrace.observe.health.family import Child, current_family
from headrace.observe.health.own_stacks import VARIABLE
from headrace.observe.health.patience import communicate

LOAD_SECONDS = 120.0
"""Seconds that importing the user's file may take."""

_numbers = itertools.count(1)
"""Numbers for the names of such processes."""


def command(module: str, arguments: Sequence[str]) -> list[str]:
    # -P: a file random.py in the working directory must not replace Python's; the user's files still find those beside them
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(file: Path | None = None) -> dict[str, str]:
    """`file`: the file into which the process writes its stacks when it is asked for them."""
    # Several such processes run beside the engine: each takes one core and does not spin, unless the user sets these variables.
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", **os.environ}
    package = str(Path(__file__).resolve().parents[3])
    if package not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # run from a checkout
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return variables | orphans.of_this_process() | ({VARIABLE: str(file)} if file else {})


def run_once(module: str, arguments: Sequence[str]) -> tuple[int, bytes, bytes]:
    """Returns exit code, standard output and standard error of a process that loads the user's code and ends.

    Raises subprocess.TimeoutExpired after `LOAD_SECONDS`. Blocks."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(module, arguments), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment()
    ) as process:
        try:
            out, err = communicate(process, LOAD_SECONDS)
        finally:
            process.kill()
    return process.returncode, out, err


def ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class ProcessLost(Exception):
    """Raised when a process has ended; the message says how."""


class UserProcess:
    """One process. Its standard input and output carry frames."""

    def __init__(
        self, kind: str, words: Sequence[str], log: Path | None, foreign: Mapping[str, str] | None = None
    ) -> None:
        """`kind`: the first word of its name in messages. `words`: its command. `log` receives what the user's code prints. `foreign`: the
        variables of a program that is none of our modules and cannot be asked for its stacks; None for one of them (`command`)."""
        self._words, self._log, self._foreign = words, log, foreign
        self._process: asyncio.subprocess.Process | None = None
        self.why = ""
        """How it ended."""
        self.alive = False
        self.who = f"{kind} {next(_numbers)}"
        self._family = current_family()
        self._stacks = log.with_name(f"{self.who.replace(' ', '-')}.stacks") if log and foreign is None else None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def reports(self) -> asyncio.StreamReader:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    @property
    def orders(self) -> asyncio.StreamWriter:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin

    async def spawn(self) -> None:
        """Raises ProcessLost if the system starts no process."""
        try:
            with _opened(self._log) as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment(self._stacks) if self._foreign is None else self._foreign,
                    start_new_session=True,  # Ctrl-C reaches the controller only; a kill reaches what the user's code started too
                )
        except OSError as error:  # no memory, no descriptors, no directory for its log
            self.why = f"could not be started: {error}"
            raise ProcessLost(self.why) from error
        self._family.started(Child(self.who, self.pid, self._stacks))

    def kill(self, why: str = "") -> None:
        self.alive = False
        self.why = self.why or why
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> int:
        """Returns the exit code, when the process has ended."""
        assert self._process is not None
        code = await self._process.wait()
        self._family.ended(self.pid)
        if self._stacks is not None:
            self._stacks.unlink(missing_ok=True)
        return code

    async def end(self, why: str) -> None:
        """Kills it, and returns when it has ended."""
        self.kill(why)
        if self._process is not None:
            self.orders.close()
            await self.gone()


def _opened(log: Path | None) -> Any:
    """Opens the file for standard error, or inherits ours if there is none."""
    return log.open("ab") if log is not None else contextlib.nullcontext()


# --- inside of it ------------------------------------------------------------------------------------------------------------


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns the standard input and output, for frames. From then on what the user's code prints goes to standard error, and its
    standard input is empty."""
    orders, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, reports


class FrameSender:
    """Writes frames from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._one = stream, threading.Lock()

    def send(self, frame: bytes) -> None:
        with self._one:
            self._stream.write(frame)
            self._stream.flush()


def obey_until_end(read: Callable[[], Any], obey: Callable[[Any], object]) -> None:
    """Starts a thread that reads frames, so that the process ends with its parent whatever the user's function is doing. `read` returns
    None at the end of the input. The process ends whenever this thread does: without it, it would wait for frames for ever."""

    def run() -> NoReturn:
        try:
            while (frame := read()) is not None:
                obey(frame)
        except Exception:
            traceback.print_exc()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgrp() == os.getpid():  # the leader of a process group, which holds all that the function started
                os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=run, daemon=True).start()
