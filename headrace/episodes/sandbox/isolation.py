"""Finds out by trial what isolation this machine has: a program tries to do what it must not, and reports what it could do."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import ConfigError
from headrace.episodes.sandbox.inside import isolation_trial
from headrace.episodes.sandbox.sandbox import Sandbox, SandboxLost
from headrace.episodes.sandbox.sandbox_limits import DEFAULT, SandboxLimits

KINDS = ("network", "filesystem", "processes", "threads", "memory", "cpu", "disk")
"""The kinds whose absence must be allowed."""
_MORE = 64 << 20
"""Bytes beyond the limit that the trial asks for."""
_DISK = 1 << 20
"""Bytes of files that the trial may write: its limit is not that of the run, which may be large."""
_FILL = "import time\nfor name in 'abc':\n    open(name, 'wb').write(bytes({}))\ntime.sleep(1000)"
"""Writes half as much again as the limit."""


class IsolationFound(NamedTuple):
    """One kind of isolation on this machine."""

    kind: str
    there: bool
    how: str
    """The means by which it is there, or what code can do without it."""


def examine_isolation(limits: SandboxLimits = DEFAULT.limits) -> list[IsolationFound]:
    """Runs the trial in a sandbox with these limits. Raises SandboxLost if no code can be run."""
    limits = limits._replace(disk=min(limits.disk, _DISK), files=max(limits.files, 3))
    sandbox = Sandbox(limits)
    try:
        with _targets(limits) as targets:
            tried = sandbox.run(Path(isolation_trial.__file__).read_text(encoding="utf-8"), json.dumps(targets))
        try:
            could: dict[str, list[str]] = json.loads(tried.out)
        except ValueError:
            raise SandboxLost(f"the trial of the sandbox failed: {tried.reason} {tried.detail}") from None
        filled = sandbox.run(_FILL.format(limits.disk // 2))
        stopped = filled.reason == "disk" or (filled.reason == "raised" and "OSError" in filled.detail)
        could["disk"] = [] if stopped else ["fill the disk"]
        return _found(could, sandbox)
    finally:
        sandbox.close()


@contextlib.contextmanager
def _targets(limits: SandboxLimits) -> Iterator[isolation_trial.Targets]:
    """Yields what the trial attacks: a file, a socket and a process of this one."""
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
    with (
        tempfile.TemporaryDirectory(prefix="headrace-outside-") as outside,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox,
        subprocess.Popen(command, stdin=subprocess.PIPE) as victim,  # ends with its input
    ):
        file, address = os.path.join(outside, "file"), os.path.join(outside, "inbox")
        Path(file).touch()
        inbox.bind(address)
        yield {
            "outside": file,
            "inbox": address,
            "victim": victim.pid,
            "memory": limits.memory + _MORE,
            "threads": limits.threads,
            "cpu_seconds": limits.cpu_seconds,
        }


def _found(could: dict[str, list[str]], sandbox: Sandbox) -> list[IsolationFound]:
    landlock, seccomp, in_memory = (sandbox.facts[name] for name in ("landlock", "seccomp", "in_memory"))
    filtered = ["seccomp"] if seccomp else []
    means = {
        "network": [*filtered, *(["a network namespace"] if in_memory else [])],
        "filesystem": [f"Landlock {landlock}"] if landlock else [],
        "processes": [*filtered, *([f"Landlock {landlock}"] if landlock >= 6 else [])],
        "threads": ["a count at each new one"],
        "memory": ["a limit of address space"],
        "cpu": ["a limit of CPU time"],
        "disk": [
            "a directory in memory of limited size" if in_memory else "a directory on the disk, looked at every 50 ms"
        ],
    }
    return [
        IsolationFound(kind, True, " and ".join(means[kind]) or "refused by the machine")
        if not could[kind]
        else IsolationFound(kind, False, f"it can {', '.join(could[kind])}")
        for kind in KINDS
    ]


def refuse_missing(limits: SandboxLimits, allow: tuple[str, ...], who: str) -> None:
    """Raises ConfigError if a kind of isolation is missing that is not allowed to be. `who`: what would run code."""
    try:
        found = examine_isolation(limits)
    except SandboxLost as error:
        raise ConfigError(f"{who} runs code in a sandbox, which does not work here: {error}") from None
    if problem := isolation_problem(found, allow, who):
        raise ConfigError(problem)


def isolation_problem(found: Sequence[IsolationFound], allow: Collection[str], who: str) -> str:
    """Returns why code that a model has written must not be run; empty if it may."""
    if missing := [isolation for isolation in found if not isolation.there and isolation.kind not in allow]:
        message = "; ".join(f"{isolation.kind}: {isolation.how}" for isolation in missing)
        named = ", ".join(f'"{kind}"' for kind in (*allow, *(isolation.kind for isolation in missing)))
        return (
            f"{who} runs code that a model has written, and this machine cannot isolate it ({message}). Run it on Linux 5.13 or newer "
            f"(x86-64 or AArch64), or allow it: sandbox.allow = [{named}]"
        )
    return ""
