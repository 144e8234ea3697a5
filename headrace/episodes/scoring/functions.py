"""Reward functions: where they run, and each as a part of the reward.

Functions of files run in processes, which can be killed, on this machine or on several. Functions that are passed from Python run in threads of the
controller's process, and can be abandoned only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.sandbox.sandbox_limits import SandboxSettings, use_settings
from headrace.episodes.scoring.config import HANDED, RewardConfig, RewardSpec, distinct
from headrace.episodes.scoring.extract import Extractor
from headrace.episodes.scoring.job import (
    Ask,
    Effort,
    LoadedReward,
    ScoringJob,
    Values,
    call,
    call_async,
    fail_all,
    is_async,
    name_of,
    signature_problem,
    too_late,
)
from headrace.episodes.scoring.parts import RewardPart, compared
from headrace.episodes.scoring.workers.processes import PrivatePool, SharedProcess, WorkerProcess, check_functions
from headrace.processes.asked_process import HERE, Site, SiteLost, Sites
from headrace.processes.health.patience import within
from headrace.processes.health.user_prints import unwrap

# --- Reward functions that are passed from Python
# One, several, or several with names and weights.


RewardFunction = Callable[..., Any]
Rewards = (
    RewardFunction
    | Sequence[RewardFunction | tuple[RewardFunction, float]]
    | Mapping[str, RewardFunction | tuple[RewardFunction, float]]
)
"""The values of `headrace.train(reward=)`. A pair is a function and its weight in the sum."""


def rewards_of(reward: Rewards) -> list[tuple[RewardSpec, RewardFunction]]:
    """Returns each function with its settings. Raises ConfigError for a value that cannot be called or has no finite weight."""
    if callable(reward):
        return [_one("", reward)]
    if isinstance(reward, Mapping):
        found = [_one(str(name), given) for name, given in reward.items()]
    elif isinstance(reward, Sequence) and not isinstance(reward, str):
        found = [_one("", given) for given in reward]
    else:
        raise ConfigError(
            f"reward= takes a function, a list of functions or a dict of name -> function, not {_shown(reward)}; a function in a "
            'file is named in the settings: reward.function = "path/to/file.py:name"'
        )
    if not found:
        raise ConfigError("reward= is empty: pass at least one function")
    return found


def _one(name: str, given: Any) -> tuple[RewardSpec, RewardFunction]:
    function, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if problem := signature_problem(function):
        raise ConfigError(f"the reward function {name or _shown(function)} {problem}")
    name = name or name_of(function)
    if ":" in name:
        raise ConfigError(f"the reward {name} has a colon in its name, which settings use for files; name it without")
    if not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ConfigError(f"the reward {name} has the weight {weight!r}; pass a pair of a function and a finite number")
    return RewardSpec(f"{HANDED}{name}", float(weight)), function


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


# --- functions ------------------------------------------------------------


_Call = Callable[[ScoringJob], Awaitable[Values]]


class FunctionPools:
    """Runs the functions of the config in processes, or `callables`, which replace them, in threads or on the running loop."""

    def __init__(
        self,
        config: RewardConfig,
        callables: Sequence[Callable[..., Any]],
        log: Path | None,
        sandbox: SandboxSettings,
        sites: Sites = HERE,
        *,
        begun: WorkerProcess | None = None,
        loaded: Sequence[LoadedReward] = (),
    ) -> None:
        """Loads the functions once, on this machine, unless `begun`, a process that has them, or `loaded` says what they are. `sites`: where
        their processes run. Raises ConfigError if one cannot be loaded."""
        self._begun, self._loaded = begun, begun.functions if begun else loaded
        self.threads = ThreadPool(config.workers, config.timeout)
        self._sites = sites
        self._pools: list[SpreadPool] = []
        self.parts: list[RewardPart] = []
        if callables:
            use_settings(sandbox)
            found = self._in_threads(config, callables)
        elif config.from_python:
            passed = ", ".join(spec.name for spec in config.from_python)
            raise ConfigError(
                f"the settings name functions that Python passed ({passed}), and no file has them: pass them again with reward= "
                "from Python, or name functions in a file in reward.functions"
            )
        else:
            found = self._in_processes(config, log, sandbox.as_text()) if config.specs else []
        names = distinct([spec.name for spec, _ in found])
        self.parts = [_part(spec, name, call, config) for (spec, call), name in zip(found, names, strict=True)]

    async def close(self) -> None:
        """Kills the processes. Abandoned threads keep running."""
        begun = [self._begun.close()] if self._begun else []
        await asyncio.gather(*(pool.close() for pool in self._pools), *begun)
        unwrap()

    @property
    def pids(self) -> list[int]:
        """The process ids of the live workers."""
        return [pid for pool in self._pools for pid in pool.pids]

    def _in_threads(
        self, config: RewardConfig, callables: Sequence[Callable[..., Any]]
    ) -> list[tuple[RewardSpec, _Call]]:
        if len(config.from_python) == len(callables):
            given = list(zip(config.from_python, callables, strict=True))
        else:
            given = rewards_of(callables)
        threads = self.threads
        return [
            (spec, partial(threads.call_async if is_async(function) else threads.call, function))
            for spec, function in given
        ]

    def _in_processes(self, config: RewardConfig, log: Path | None, sandbox: str) -> list[tuple[RewardSpec, _Call]]:
        loaded = self._loaded or check_functions(config.named, sandbox)
        kinds = dict(zip(config.named, (reward.is_async for reward in loaded), strict=True))
        plain = [function for function, is_async in kinds.items() if not is_async]
        later = [function for function, is_async in kinds.items() if is_async]
        calls: dict[str, _Call] = {}
        if plain:
            width = config.workers
            pool = SpreadPool(
                self._sites, lambda site: PrivatePool([sandbox, *plain], width, config.timeout, log, site), width
            )
            self._pools.append(pool)
            calls |= {function: partial(pool.call, place) for place, function in enumerate(plain)}
        if later:
            shared = SpreadPool(self._sites, lambda site: SharedProcess([sandbox, *later], config.timeout, log, site))
            self._pools.append(shared)
            calls |= {function: partial(shared.call, place) for place, function in enumerate(later)}
        if self._begun and len(self._pools) == 1:
            self._pools[0].adopt(self._begun)
        return [(spec, calls[spec.function]) for spec in config.specs]


def _part(spec: RewardSpec, name: str, call: _Call, config: RewardConfig) -> RewardPart:
    async def ask(job: ScoringJob, effort: Effort) -> Values:
        return await call(job)

    how: Ask = compared(ask) if spec.compares else ask
    extract = Extractor(spec.extract, config.extract_truncated)
    return RewardPart(name=name, weight=spec.weight, ask=how, extract=extract, segments=spec.segments, form=spec.form)


LIVES = 3
"""How often a call is made at most, where the machine is lost that it is made on: the function may be what ends it."""


class SpreadPool:
    """Calls of reward functions on several machines, with a pool on each: a call goes to the one that has the least in hand, and to another one if that is lost."""

    def __init__(
        self, sites: Sites, make: Callable[[Site], PrivatePool | SharedProcess], width: float = math.inf
    ) -> None:
        """`width`: calls that one machine is given at once; others wait for a turn on any of them."""
        self._sites, self._width = sites, width
        self._pools = {site: make(site) for site in sites.every}
        self._in_hand: Counter[Site] = Counter()
        self._turn = asyncio.Event()
        """Set whenever there may be a turn: a call has ended, a machine has come up."""
        sites.listen(self._turn.set)

    def adopt(self, worker: WorkerProcess) -> None:
        """Takes over a process of this machine that has these functions."""
        self._pools[worker.site].adopt(worker)

    @property
    def pids(self) -> Sequence[int]:
        return [pid for pool in self._pools.values() for pid in pool.pids]

    async def call(self, function: int, job: ScoringJob) -> Values:
        how = ""
        for _ in range(LIVES):
            site = await self._take()
            try:
                return await self._pools[site].call(function, job)
            except SiteLost as lost:
                how = str(lost)
            finally:
                self._in_hand[site] -= 1
                self._turn.set()
        return fail_all(
            job, "reward_worker_died", f"{LIVES} processes that ran it were lost with their machines; the last {how}"
        )

    async def _take(self) -> Site:
        while True:
            self._turn.clear()
            site = await self._sites.least(self._in_hand.__getitem__)
            if self._in_hand[site] < self._width:
                self._in_hand[site] += 1
                return site
            await self._turn.wait()

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))


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
