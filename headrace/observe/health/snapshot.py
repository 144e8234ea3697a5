"""The picture of a moment: every named wait, the stacks of this process's threads and tasks, those of its worker processes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.observe.health import own_stacks, stacks
from headrace.observe.health.family import Family
from headrace.observe.health.waits import Lasting, counted


@dataclass(frozen=True)
class Picture:
    taken: float
    accounts: Sequence[stacks.Account]
    """One of each worker process."""
    lines: Sequence[str]
    path: Path
    """Where the lines are kept."""


class Camera:
    """Takes pictures, and keeps each as `logs/stacks-<n>.txt`. From any thread but the event loop's: it takes up to 2 seconds."""

    def __init__(self, logs: Path, family: Family, lasting: Callable[[], list[Lasting]]) -> None:
        self._logs, self._family, self._lasting = logs, family, lasting
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last: Picture | None = None
        self._one_at_a_time = threading.Lock()

    def take(self, why: str) -> Picture:
        """Several who ask at the same time get the same one."""
        asked = time.monotonic()
        with self._one_at_a_time:
            if self.last is None or self.last.taken < asked:
                self.last = self._take(why)
            return self.last

    def _take(self, why: str) -> Picture:
        lines = [f"headrace: {why}", "", "waits, longest first:"]
        lines += [f"  {said}" for said, _ in counted(self._lasting())] or ["  nobody waits"]
        lines += ["", f"--- controller, pid {os.getpid()}", *own_stacks.thread_lines([threading.get_ident()])]
        if self.loop is not None:
            with suppress(RuntimeError):  # the tasks change faster than they can be counted
                lines += own_stacks.task_lines(self.loop)
        accounts = stacks.ask(self._family.children())
        for account in accounts:
            lines += ["", *account.lines]
        return Picture(time.monotonic(), accounts, lines, self._keep(lines))

    def _keep(self, lines: Sequence[str]) -> Path:
        number = 1
        while (path := self._logs / f"stacks-{number}.txt").exists():
            number += 1
        with suppress(OSError):  # a full disk must not hide what is said on the terminal
            path.write_text("\n".join(lines) + "\n")
        return path


def blame(wait: Lasting, every: Sequence[Lasting], accounts: Sequence[stacks.Account]) -> tuple[str, list[str]]:
    """In a few words, and with its stack: whom the wait names; where it names nobody (`8 scored groups`), whom the others name.

    A scorer that was handed in from Python has no process: its threads are in this one.
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
"""How the names of threads that run a user's functions begin."""
