"""Reward functions: where they run, and each as a part of the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.sandbox.sandbox_limits import SandboxSettings
from headrace.episodes.sandbox.use import use_settings
from headrace.episodes.scoring.config import RewardConfig, RewardSpec, distinct
from headrace.episodes.scoring.extract import Extractor
from headrace.episodes.scoring.job import Ask, Effort, LoadedReward, ScoringJob, Values, is_async
from headrace.episodes.scoring.parts.comparing import compared
from headrace.episodes.scoring.parts.part import RewardPart
from headrace.episodes.scoring.python_rewards import rewards_of
from headrace.episodes.scoring.workers.processes import PrivatePool, SharedProcess, WorkerProcess, check_functions
from headrace.episodes.scoring.workers.spread import SpreadPool
from headrace.episodes.scoring.workers.threads import ThreadPool
from headrace.processes.asked_process import HERE, Sites
from headrace.processes.health.user_prints import unwrap

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
        kinds = dict(zip(config.named, (one.is_async for one in loaded), strict=True))
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
    # What Python passed is not extracted from: it gets the whole text.
    extract = Extractor() if spec.from_python else Extractor(spec.extract, config.extract_truncated)
    return RewardPart(name=name, weight=spec.weight, ask=how, extract=extract, segments=spec.segments, form=spec.form)
