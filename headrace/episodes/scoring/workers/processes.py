"""Reward functions of the user's files, run in processes that can be killed: their timeouts hold whatever the code does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.episodes.scoring.job import LoadedReward, ScoringJob, Values, fail_all, too_late
from headrace.episodes.scoring.workers.reward_messages import Call, Ready, Reply, decode_answer, pack
from headrace.processes.asked_process import (
    OWN_SITE,
    AskedProcess,
    ProcessLost,
    Site,
    SiteLost,
    first_report,
    not_loaded,
    too_slow,
)
from headrace.processes.frames import receive_frame

_MODULE = "headrace.episodes.scoring.workers.reward_worker"
_LOADING = " while it loaded the reward functions"

GRACE = 1.0
"""Seconds beyond the timeout before a process whose loop an async function blocks is killed."""


def check_functions(specs: Sequence[str], sandbox: str) -> tuple[LoadedReward, ...]:
    """Loads the functions once in a separate process. `sandbox`: the settings of code that they run. Raises ConfigError if one cannot be loaded."""
    ready = decode_answer(first_report(_MODULE, ["--check", sandbox, *specs], _named(specs)))
    assert isinstance(ready, Ready)
    if ready.error:
        raise ConfigError(ready.error)
    return ready.functions


def _named(specs: Sequence[str]) -> str:
    return f"the reward functions {', '.join(specs)}"


class WorkerProcess(AskedProcess[Call, Reply | Ready]):
    """One worker process, and the calls that it has not answered yet."""

    begins = "load", "the reward functions"
    says = "answer"

    def __init__(self, arguments: Sequence[str], log: Path | None, site: Site = OWN_SITE) -> None:
        """`arguments`: the settings of the sandbox, and the functions."""
        super().__init__("scorer", [_MODULE, *arguments], log, site=site)
        self.functions: tuple[LoadedReward, ...] = ()
        """The functions, once it has started."""
        self.refused = ""
        """The reason why it cannot load them, which is the user's mistake."""
        self._ids: Iterator[int] = itertools.count()
        self._waiting: dict[int, asyncio.Future[Values]] = {}

    def pack(self, order: Call) -> bytes:
        return pack(order)

    async def receive(self) -> Reply | Ready:
        return decode_answer(await receive_frame(self.reports))

    def accept(self, first: Reply | Ready) -> str:
        assert isinstance(first, Ready)
        self.functions, self.refused = first.functions, first.error
        return first.error and f"could not load the reward functions a second time: {first.error}"

    async def ask(self, function: int, job: ScoringJob, seconds: float) -> Values:
        """Returns the worker's answer, without a deadline of its own; the worker cancels an async function after `seconds`.

        Raises ProcessLost if the process ends before it answers.
        """
        if not self.alive:
            raise self.how_lost()
        id = next(self._ids)
        answer: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self._waiting[id] = answer
        try:
            self.send(Call(id, function, job, seconds))
            with contextlib.suppress(
                ConnectionError
            ):  # a batch is large: the next one waits until the worker has read it
                await self.orders.drain()
            return await answer
        finally:
            self._waiting.pop(id, None)

    def obey(self, report: Reply | Ready) -> None:
        assert not isinstance(report, Ready)
        waiting = self._waiting.get(report.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(report.values)

    def forsake(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self.how_lost())


async def begin_worker(specs: Sequence[str], sandbox: str, log: Path) -> WorkerProcess:
    """Starts a process that has loaded the functions, and goes on to run them. `log`: receives what they print. Raises ConfigError as
    `check_functions` does; no process is left then."""
    worker = WorkerProcess([sandbox, *specs], log)
    try:
        await worker.start()
    except ProcessLost as lost:
        if isinstance(lost.__cause__, TimeoutError):
            raise ConfigError(too_slow(_named(specs))) from None
        if worker.refused:
            raise ConfigError(worker.refused) from None
        printed = await asyncio.to_thread(log.read_text, errors="replace") if log.exists() else ""  # noqa: ASYNC240
        how = str(lost).removesuffix(_LOADING)
        raise ConfigError(not_loaded(_named(specs), how, printed)) from None
    return worker


class PrivatePool:
    """`width` processes for functions that are not async, with one call at a time in each. A call that exceeds its timeout has its
    process killed, and the next call starts another one."""

    def __init__(
        self, arguments: Sequence[str], width: int, timeout: float, log: Path | None, site: Site = OWN_SITE
    ) -> None:
        self._arguments, self._timeout, self._log, self._site = arguments, timeout, log, site
        self._slots = asyncio.Semaphore(width)
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._all if worker.alive]

    async def call(self, function: int, job: ScoringJob) -> Values:
        """Raises SiteLost if the machine is lost."""
        async with self._slots:  # waiting for a free process does not count towards the timeout
            worker = self._take()
            answered = False
            try:
                if not worker.alive:
                    await worker.start()
                values = await worker.within(self._timeout, worker.ask(function, job, self._timeout))
                answered = True
                return values
            except TimeoutError:
                return too_late(job, self._timeout, "its process was killed")
            except SiteLost:
                raise
            except ProcessLost as lost:
                return fail_all(job, "reward_worker_died", f"the process that ran it {lost}")
            finally:
                await self._give_back(worker, answered)

    def adopt(self, worker: WorkerProcess) -> None:
        """Takes over a process that has these functions."""
        self._idle.append(worker)
        self._all.add(worker)

    def _take(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._all.discard(worker)
        worker = WorkerProcess(self._arguments, self._log, self._site)
        self._all.add(worker)
        return worker

    async def _give_back(self, worker: WorkerProcess, answered: bool) -> None:
        if answered and worker.alive:
            self._idle.append(worker)
            return
        worker.kill("was too late")
        await worker.close()
        self._all.discard(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in list(self._all)))
        self._all.clear()
        self._idle.clear()


class SharedProcess:
    """One process for async functions, with any number of calls at once. It cancels calls that exceed their timeout."""

    def __init__(self, arguments: Sequence[str], timeout: float, log: Path | None, site: Site = OWN_SITE) -> None:
        self._arguments, self._timeout, self._log, self._site = arguments, timeout, log, site
        self._starting = asyncio.Lock()
        self._worker: WorkerProcess | None = None

    @property
    def pids(self) -> list[int]:
        return [self._worker.pid] if self._worker is not None and self._worker.alive else []

    async def call(self, function: int, job: ScoringJob) -> Values:
        """Raises SiteLost if the machine is lost."""
        worker: WorkerProcess | None = None
        try:
            worker = await self._ready()
            return await worker.within(self._timeout + GRACE, worker.ask(function, job, self._timeout))
        except TimeoutError:
            assert worker is not None
            worker.kill("was killed, because one of its async functions blocked all the others")
            return too_late(job, self._timeout, "it blocked its event loop, so its process was killed")
        except SiteLost:
            raise
        except ProcessLost as lost:
            return fail_all(job, "reward_worker_died", f"the process that ran it {lost}")

    def adopt(self, worker: WorkerProcess) -> None:
        """Takes over a process that has these functions."""
        self._worker = worker

    async def _ready(self) -> WorkerProcess:
        async with self._starting:
            if self._worker is None or not self._worker.alive:
                if self._worker is not None:
                    await self._worker.close()
                self._worker = WorkerProcess(self._arguments, self._log, self._site)
                await self._worker.start()
            return self._worker

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()
