"""Snapshots: every named wait, the stacks of this process's threads and tasks, and those of its worker processes, at one moment."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.facts.waits import Lasting, counted
from headrace.processes.health import own_stacks, stacks
from headrace.processes.health.family import Family


@dataclass(frozen=True)
class Snapshot:
    taken: float
    accounts: Sequence[stacks.Account]
    """One per worker process."""
    lines: Sequence[str]
    path: Path
    """The file with the lines."""


class Camera:
    """Takes snapshots, and writes each to `logs/stacks-<n>.txt`. May be used in any thread but the event loop's: it takes up to 2 seconds."""

    def __init__(self, logs: Path, family: Family, lasting: Callable[[], list[Lasting]]) -> None:
        self._logs, self._family, self._lasting = logs, family, lasting
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last: Snapshot | None = None
        self._one_at_a_time = threading.Lock()

    def take(self, why: str) -> Snapshot:
        """Takes a snapshot. Callers at the same time get the same one."""
        asked = time.monotonic()
        with self._one_at_a_time:
            if self.last is None or self.last.taken < asked:
                self.last = self._take(why)
            return self.last

    def _take(self, why: str) -> Snapshot:
        lines = [f"headrace: {why}", "", "waits, longest first:"]
        lines += [f"  {said}" for said, _ in counted(self._lasting())] or ["  nothing waits"]
        lines += ["", f"--- controller, pid {os.getpid()}", *own_stacks.thread_lines([threading.get_ident()])]
        if self.loop is not None:
            with suppress(RuntimeError):  # the tasks change faster than they can be counted
                lines += own_stacks.task_lines(self.loop)
        accounts = stacks.ask(self._family.children())
        for account in accounts:
            lines += ["", *account.lines]
        return Snapshot(time.monotonic(), accounts, lines, self._keep(lines))

    def _keep(self, lines: Sequence[str]) -> Path:
        number = 1
        while (path := self._logs / f"stacks-{number}.txt").exists():
            number += 1
        with suppress(OSError):  # a full disk must not prevent the report on the terminal
            path.write_text("\n".join(lines) + "\n")
        return path


def blame(wait: Lasting, every: Sequence[Lasting], accounts: Sequence[stacks.Account]) -> tuple[str, list[str]]:
    """Returns the cause of a wait in a few words, and its stacks. The cause is the worker that the wait names; if it names none
    (`8 scored groups`), those that the other waits name.

    A scorer that was passed from Python has no process: its threads are in this one.
    """
    for what in (wait.what, ", ".join(one.what for one in every)):
        guilty = [one for one in accounts if one.child.who in what]
        guilty = guilty or [one for one in accounts if one.child.who.split()[0] in what]  # `scorer 2`: one of several
        threads = own_stacks.threads_named(REWARD_THREADS) if "scorer" in what else []
        if guilty or threads:
            said = [one.brief for one in guilty]
            said += [f"thread {name}: in {own_stacks.thread_place(ident)}" for name, ident in threads]
            lines = [line for one in guilty for line in one.short]
            for name, ident in threads:
                lines += [f"--- controller, thread {name}", *own_stacks.thread_stack(ident)[-stacks.SHORT :]]
            return "; ".join(said), lines
    return "", []


REWARD_THREADS = "headrace-reward-"
"""Prefix of the names of threads that run a user's functions."""
