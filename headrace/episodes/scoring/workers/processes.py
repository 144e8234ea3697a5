"""Reward functions of the user's files, run in processes that can be killed: their timeouts hold whatever the code does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.episodes.scoring.job import LoadedReward, ScoringJob, Values, fail_all, too_late
from headrace.episodes.scoring.workers.reward_messages import Call, Ready, pack, read_answer, receive
from headrace.processes.frames import StreamEnded
from headrace.processes.health.user_process import (
    LOAD_SECONDS,
    OWN_SITE,
    ProcessLost,
    Site,
    SiteLost,
    UserProcess,
    ending,
    run_once,
)

_MODULE = "headrace.episodes.scoring.workers.reward_worker"
_LOADING = " while it loaded the reward functions"

GRACE = 1.0
"""Seconds beyond the timeout before a process whose loop an async function blocks is killed."""


def check_functions(specs: Sequence[str], sandbox: str) -> tuple[LoadedReward, ...]:
    """Loads the functions once in a separate process. `sandbox`: the settings of code that they run. Raises ConfigError if one cannot be loaded."""
    named = ", ".join(specs)
    try:
        code, out, err = run_once(_MODULE, ["--check", sandbox, *specs])
    except subprocess.TimeoutExpired:
        raise ConfigError(too_slow(named)) from None
    try:
        first = read_answer(io.BytesIO(out))
    except StreamEnded:
        first = None
    if not isinstance(first, Ready):
        said = (err.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"the process that loads the reward functions {named} {ending(code)}; it said: {said}")
    if first.error:
        raise ConfigError(first.error)
    return first.functions


def too_slow(named: str) -> str:
    """The sentence for functions whose file does not end."""
    return f"loading the reward functions {named} took more than {LOAD_SECONDS:g} s; move slow work out of the file's top level"


class WorkerProcess(UserProcess):
    """One worker process, and the calls that it has not answered yet."""

    def __init__(self, arguments: Sequence[str], log: Path | None, site: Site = OWN_SITE) -> None:
        """`arguments`: the settings of the sandbox, and the functions."""
        super().__init__("scorer", [_MODULE, *arguments], log, site=site)
        self._named = ", ".join(arguments[1:])
        self.functions: tuple[LoadedReward, ...] = ()
        """The functions, once it has started."""
        self._ids: Iterator[int] = itertools.count()
        self._waiting: dict[int, asyncio.Future[Values]] = {}
        self._receiving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the functions are loaded. Raises ProcessLost when they are not."""
        await self.spawn()
        try:
            ready = await self.within(LOAD_SECONDS, receive(self.reports))
        except TimeoutError:
            await self.close(f"did not load the reward functions within {LOAD_SECONDS:g} s")
            raise ProcessLost(self.why) from ConfigError(too_slow(self._named))
        except StreamEnded:
            how = await self.gone()
            await self.close(f"{how}{_LOADING}")
            raise self.how_lost() from None
        except asyncio.CancelledError:
            await self.close("was not needed any more")
            raise
        assert isinstance(ready, Ready)
        if ready.error:
            await self.close(f"could not load the reward functions a second time: {ready.error}")
            raise ProcessLost(self.why) from ConfigError(ready.error)
        self.functions = ready.functions
        self.alive = True
        self._receiving = asyncio.create_task(self._receive())

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
            with contextlib.suppress(ConnectionError):  # `_receive` finds out how the process ended
                self.orders.write(pack(Call(id, function, job, seconds)))
                await self.orders.drain()
            return await answer
        finally:
            self._waiting.pop(id, None)

    async def _receive(self) -> None:
        try:
            while True:
                reply = await receive(self.reports)
                assert not isinstance(reply, Ready)
                waiting = self._waiting.get(reply.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply.values)
        except ConnectionError:
            pass
        except (
            Exception
        ) as error:  # nothing awaits this task: without this, the caller would report a timeout of the function
            self.why = f"was killed, because its answer made no sense: {error!r}"
        self.alive = False
        self.kill()  # a worker that closed its pipe cannot be used, and may have left children
        how = await self.gone()
        self.why = self.why or how
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self.how_lost())

    async def close(self, why: str = "was closed") -> None:
        """Returns with the process gone."""
        await self.end(why)
        if self._receiving is not None:
            await asyncio.wait({self._receiving})


async def begin_worker(specs: Sequence[str], sandbox: str, log: Path) -> WorkerProcess:
    """Starts a process that has loaded the functions, and goes on to run them. `log`: receives what they print. Raises ConfigError as
    `check_functions` does; no process is left then."""
    worker = WorkerProcess([sandbox, *specs], log)
    try:
        await worker.start()
    except ProcessLost as lost:
        if isinstance(lost.__cause__, ConfigError):
            raise lost.__cause__ from None
        printed = await asyncio.to_thread(log.read_text, errors="replace") if log.exists() else ""  # noqa: ASYNC240
        said = (printed.strip().splitlines() or ["nothing"])[-1]
        how = str(lost).removesuffix(_LOADING)
        raise ConfigError(
            f"the process that loads the reward functions {', '.join(specs)} {how}; it said: {said}"
        ) from None
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
