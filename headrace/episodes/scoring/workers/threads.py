"""Reward functions that are passed from Python: they run in the controller's process, so that they can be abandoned but not killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.episodes.scoring.job import ScoringJob, Values, call, call_async, name_of, too_late
from headrace.processes.health.patience import within

_numbers = itertools.count(1)


class ThreadPool:
    """Daemon threads, which never delay the end of the program. A call that exceeds its timeout keeps its thread until it returns."""

    def __init__(self, width: int, timeout: float) -> None:
        self._slots, self._timeout = asyncio.Semaphore(width), timeout
        self.abandoned: Counter[str] = Counter()
        """The number of abandoned threads, by the name of their function."""

    async def call(self, function: Callable[..., Any], job: ScoringJob) -> Values:
        async with self._slots:
            answer: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
            name = f"headrace-reward-{name_of(function)}-{next(_numbers)}"
            thread = threading.Thread(target=_work, args=(function, job, answer), name=name, daemon=True)
            thread.start()
            assert thread.native_id is not None, "it has been started"
            try:
                return await within(thread.native_id, self._timeout, answer)
            except TimeoutError:
                self.abandoned[name_of(function)] += 1
                return too_late(
                    job, self._timeout, f"the thread {name} was abandoned ({self.abandoned.total()} so far)"
                )

    async def call_async(self, function: Callable[..., Any], job: ScoringJob) -> Values:
        return await call_async(function, job, self._timeout)


def _work(function: Callable[..., Any], job: ScoringJob, answer: asyncio.Future[Values]) -> None:
    values = call(function, job)
    with contextlib.suppress(RuntimeError):  # the loop may be closed by now
        answer.get_loop().call_soon_threadsafe(_settle, answer, values)


def _settle(answer: asyncio.Future[Values], values: Values) -> None:
    if not answer.done():
        answer.set_result(values)
