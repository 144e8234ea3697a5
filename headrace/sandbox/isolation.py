"""Finds out by trial what isolation this machine has: a program tries to do what it must not, and reports what it could do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Sequence
from typing import NamedTuple

from headrace.errors import ConfigError
from headrace.sandbox.sandbox import Sandbox, SandboxLost
from headrace.sandbox.sandbox_limits import DEFAULT, SandboxLimits

KINDS = {
    "network": "it can open sockets",
    "filesystem": "it can read and write the files of the user",
    "processes": "it can start processes and send signals to others",
    "memory": "nothing limits its memory",
}
"""The kinds whose absence must be allowed, and what code can do without."""

_TRIAL = """
import json, os, socket

def could(work):
    try:
        work()
        return True
    except (OSError, MemoryError):
        return False

def network():
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())

def read():
    open(OUTSIDE).close()

def write():
    open(OUTSIDE, "a").close()

def start():
    if os.fork() == 0:
        os._exit(0)

def signal():
    os.kill(os.getppid(), 0)

def memory():
    bytearray(MORE)

print(json.dumps({work.__name__: could(work) for work in (network, read, write, start, signal, memory)}))
"""


class IsolationFound(NamedTuple):
    """One kind of isolation on this machine."""

    kind: str
    there: bool
    how: str
    """The means by which it is there, or what code can do without it."""


def examine_isolation(limits: SandboxLimits = DEFAULT.limits) -> list[IsolationFound]:
    """Runs the trial. Raises SandboxLost if no code can be run."""
    sandbox = Sandbox(limits)
    try:
        with tempfile.NamedTemporaryFile(prefix="headrace-outside-") as outside:
            names = f"OUTSIDE, MORE = {outside.name!r}, {limits.memory + (64 << 20)}\n"
            tried = sandbox.run(names + _TRIAL)
            try:
                could = json.loads(tried.out)
            except ValueError:
                raise SandboxLost(f"the trial of the sandbox failed: {tried.reason} {tried.detail}") from None
            return _found(could, sandbox)
    finally:
        sandbox.close()


def _found(could: dict[str, bool], sandbox: Sandbox) -> list[IsolationFound]:
    landlock, seccomp, in_memory = (sandbox.facts[name] for name in ("landlock", "seccomp", "in_memory"))
    filtered = ["seccomp"] if seccomp else []
    means = {
        "network": [*filtered, *(["a network namespace"] if in_memory else [])],
        "filesystem": [f"Landlock {landlock}"] if landlock else [],
        "processes": [*filtered, *([f"Landlock {landlock}"] if landlock >= 6 else [])],
        "memory": ["a limit of address space"],
    }
    broken = {
        "network": could["network"],
        "filesystem": could["read"] or could["write"],
        "processes": could["start"] or could["signal"],
        "memory": could["memory"],
    }
    found = [
        IsolationFound(kind, not broken[kind], KINDS[kind] if broken[kind] else " and ".join(means[kind]))
        for kind in KINDS
    ]
    disk = "a directory in memory of limited size" if in_memory else "a directory on the disk, looked at every 50 ms"
    return [*found, IsolationFound("cpu", True, "a limit of CPU time"), IsolationFound("disk", True, disk)]


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
    if missing := [one for one in found if not one.there and one.kind not in allow]:
        said = "; ".join(f"{one.kind}: {one.how}" for one in missing)
        named = ", ".join(f'"{one.kind}"' for one in missing)
        return (
            f"{who} runs code that a model has written, and this machine cannot isolate it ({said}). Run it on Linux 5.13 or newer "
            f"(x86-64 or AArch64), or allow it: sandbox.allow = [{named}]"
        )
    return ""
