"""The scorer of reward functions: calls all of them at once for a group, and adds their weighted results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.sandbox.sandbox_limits import DEFAULT, SandboxSettings
from headrace.sandbox.use import use_settings
from headrace.scoring.config import RewardConfig, distinct
from headrace.scoring.extract import Extractor
from headrace.scoring.job import ScoringJob, Values, is_async, transcript_of
from headrace.scoring.python_rewards import rewards_of
from headrace.scoring.workers.processes import PrivatePool, SharedProcess, check_functions
from headrace.scoring.workers.threads import ThreadPool
from headrace.types import Episode, Failure, Prompt, Scored


@dataclass(frozen=True)
class _Judge:
    name: str
    weight: float
    extract: Extractor
    call: Callable[[ScoringJob], Awaitable[Values]]

    async def judge(self, prompt: Prompt, episodes: Sequence[Episode]) -> Values:
        texts = tuple(self.extract(episode.last) for episode in episodes)
        tokens = tuple(episode.last.tokens for episode in episodes)
        talks = tuple(transcript_of(episode) for episode in episodes)
        job = ScoringJob(
            prompt=prompt.text,
            completions=texts,
            completion_tokens=tokens,
            columns=prompt.columns,
            chat=prompt.chat,
            transcripts=talks if any(talks) else (),
        )
        return await self.call(job)


class FunctionScorer:
    """Runs the functions of the config in processes, or `callables`, which replace them, in threads or on the running loop."""

    def __init__(
        self,
        config: RewardConfig,
        callables: Sequence[Callable[..., Any]] = (),
        log: Path | None = None,
        sandbox: SandboxSettings = DEFAULT,
    ) -> None:
        """Loads the functions once. Raises ConfigError if one cannot be loaded. `log` receives what they print; `sandbox` is used by those
        that run code."""
        self.threads = ThreadPool(config.workers, config.timeout)
        self._pools: list[PrivatePool | SharedProcess] = []
        if callables:
            use_settings(sandbox)
            self._judges = self._judges_in_threads(config, callables)
        elif config.from_python:
            names = ", ".join(spec.name for spec in config.from_python)
            raise ConfigError(
                f"the settings name functions that Python passed ({names}), and no file has them: pass them again with reward= "
                "from Python, or name functions in a file in reward.functions"
            )
        elif config.specs:
            self._judges = self._judges_in_processes(config, log, sandbox.as_text())
        else:
            raise ConfigError(
                'nothing gives rewards: set reward.function = "path/to/file.py:name" (or "reasoning_gym"), or pass reward= '
                "to headrace.train"
            )
        self._judges = _with_distinct_names(self._judges)

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        if not episodes:
            return []
        values = await asyncio.gather(*(judge.judge(prompt, episodes) for judge in self._judges))
        return [
            self._combined(episode, parts) for episode, parts in zip(episodes, zip(*values, strict=True), strict=True)
        ]

    async def close(self) -> None:
        """Kills the processes. Abandoned threads keep running."""
        await asyncio.gather(*(pool.close() for pool in self._pools))

    @property
    def pids(self) -> list[int]:
        """The process ids of the live workers."""
        return [pid for pool in self._pools for pid in pool.pids]

    def _combined(self, episode: Episode, parts: Sequence[float | Failure | None]) -> Scored | Failure:
        rewards: dict[str, float] = {}
        for judge, part in zip(self._judges, parts, strict=True):
            if isinstance(part, Failure):  # a sum without one of its parts is not the reward
                return msgspec.structs.replace(part, detail=f"{judge.name}: {part.detail}")
            if part is not None:
                rewards[judge.name] = part
        if not rewards:
            return Failure("reward_none", "no reward function applies to this row: all of them returned None for it")
        total = sum(judge.weight * rewards[judge.name] for judge in self._judges if judge.name in rewards)
        if not math.isfinite(total):
            return Failure("reward_nan", f"the weighted sum of {rewards} is {total}")
        extracted = {judge.name: judge.extract(episode.last) for judge in self._judges if judge.extract.kind}
        return Scored(episode, total, rewards, extracted=extracted)

    def _judges_in_threads(self, config: RewardConfig, callables: Sequence[Callable[..., Any]]) -> list[_Judge]:
        if len(config.from_python) == len(callables):
            given = list(zip(config.from_python, callables, strict=True))
        else:
            given = rewards_of(callables)
        return [_Judge(spec.name, spec.weight, Extractor(), self._in_thread(function)) for spec, function in given]

    def _in_thread(self, function: Callable[..., Any]) -> Callable[[ScoringJob], Awaitable[Values]]:
        return partial(self.threads.call_async if is_async(function) else self.threads.call, function)

    def _judges_in_processes(self, config: RewardConfig, log: Path | None, sandbox: str) -> list[_Judge]:
        loaded = check_functions([spec.function for spec in config.specs], sandbox)
        kinds = dict(zip((spec.function for spec in config.specs), (one.is_async for one in loaded), strict=True))
        plain = [function for function, is_async in kinds.items() if not is_async]
        later = [function for function, is_async in kinds.items() if is_async]
        calls: dict[str, Callable[[ScoringJob], Awaitable[Values]]] = {}
        if plain:
            pool = PrivatePool([sandbox, *plain], config.workers, config.timeout, log)
            self._pools.append(pool)
            calls |= {function: partial(pool.call, place) for place, function in enumerate(plain)}
        if later:
            shared = SharedProcess([sandbox, *later], config.timeout, log)
            self._pools.append(shared)
            calls |= {function: partial(shared.call, place) for place, function in enumerate(later)}
        return [
            _Judge(spec.name, spec.weight, Extractor(spec.extract, config.extract_truncated), calls[spec.function])
            for spec in config.specs
        ]


def _with_distinct_names(judges: Sequence[_Judge]) -> list[_Judge]:
    names = distinct([judge.name for judge in judges])
    return [replace(judge, name=name) for judge, name in zip(judges, names, strict=True)]
