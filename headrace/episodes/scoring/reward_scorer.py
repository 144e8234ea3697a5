"""The scorer of a run: asks functions, services and judges at once for a group, and adds their weighted results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.core.batches import Failure
from headrace.core.chat.reading import is_opened_by
from headrace.core.errors import ConfigError
from headrace.core.protocols import Scorer
from headrace.core.rewards import usable
from headrace.core.types import Episode, Prompt, Scored
from headrace.episodes.sandbox.sandbox_limits import DEFAULT, SandboxSettings
from headrace.episodes.scoring.config import PUNISHMENT, OverlongConfig, RewardConfig
from headrace.episodes.scoring.extract import Decode, Extractor, graded, returns_of
from headrace.episodes.scoring.functions import FunctionPools, ThreadPool
from headrace.episodes.scoring.job import LoadedReward
from headrace.episodes.scoring.parts import PartCaller, RewardPart, ScoreLog, compared
from headrace.episodes.scoring.services.config import check_client
from headrace.episodes.scoring.services.endpoint import HttpPoster, HttpService, Poster
from headrace.episodes.scoring.services.judge import Judge
from headrace.episodes.scoring.workers.processes import WorkerProcess
from headrace.facts.telemetry import Telemetry
from headrace.processes.asked_process import HERE, Sites

# --- Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13)
# Completions that come near the limit of length lose reward.
#
# With a punishment at the limit alone, a correct argument that is a few tokens too long would be punished like a wrong one.


def soft_overlong_punishment(length: int, longest: int, cache: int) -> float:
    """Returns 0 up to `longest - cache` tokens; from there it falls linearly to -1 at `longest`."""
    free = longest - cache
    return 0.0 if length <= free else max((free - length) / cache, -1.0)


class PunishedScorer:
    """Adds the punishment, under its name, to the rewards of the inner scorer. The longest completion of an episode counts."""

    def __init__(self, inner: Scorer, config: OverlongConfig, longest: int) -> None:
        """`longest`: tokens of the longest completion (rollout.max_tokens)."""
        self._inner, self._config, self._longest = inner, config, longest

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        return [self._punished(rollout) for rollout in await self._inner.score(prompt, episodes)]

    def _punished(self, rollout: Scored | Failure) -> Scored | Failure:
        if isinstance(rollout, Failure):
            return rollout
        length = max(len(turn.completion.tokens) for turn in rollout.episode.turns)
        value = soft_overlong_punishment(length, self._longest, self._config.cache)
        return replace(
            rollout, reward=rollout.reward + self._config.weight * value, rewards={**rollout.rewards, PUNISHMENT: value}
        )

    async def close(self) -> None:
        await self._inner.close()


def punished(config: OverlongConfig, longest: int, scorer: Scorer) -> Scorer:
    """Wraps the scorer for training. Evaluations are not punished: a held-out reward measures the task."""
    return PunishedScorer(scorer, config, longest) if config.cache else scorer


# --- reward scorer ------------------------------------------------------------


_END = 8
"""Tokens at the end of a prompt among which a template may open the model's thinking."""


class RewardScorer:
    """Protocol `Scorer`. Functions run in processes; `callables`, which replace them, in threads or on the running loop."""

    def __init__(
        self,
        config: RewardConfig,
        callables: Sequence[Callable[..., Any]] = (),
        *,
        log: Path | None = None,
        sandbox: SandboxSettings = DEFAULT,
        decode: Decode | None = None,
        telemetry: Telemetry | None = None,
        scores: ScoreLog | None = None,
        poster: Poster | None = None,
        sites: Sites = HERE,
        begun: WorkerProcess | None = None,
        loaded: Sequence[LoadedReward] = (),
    ) -> None:
        """Loads the functions once, if neither `begun` nor `loaded` (see `FunctionPools`) says what they are. Raises ConfigError if one cannot be loaded, or a token cannot be had.

        `log` receives what functions print; `sandbox` is used by those that run code; `decode` is needed for scores of segments, and tells whether a template has opened the model's thinking; `scores`
        records what services and judges say; `poster` is the client of services, over HTTP by default; `sites`: the machines on which
        functions run."""
        self._pools = FunctionPools(config, callables, log, sandbox, sites, begun=begun, loaded=loaded)
        check_client([] if poster else [endpoint.name for endpoint in config.endpoints])
        self._poster = poster or HttpPoster()
        self._parts = [*self._pools.parts, *_over_http(config, self._poster)]
        if not self._parts:
            raise ConfigError(
                'nothing gives rewards: set reward.function = "path/to/file.py:name" (or "reasoning_gym"), or pass reward= '
                "to headrace.train"
            )
        self._caller = PartCaller(telemetry, scores, self._begun)
        self._decode = decode

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        if not episodes:
            return []
        values = await asyncio.gather(*(self._caller.call(part, prompt, episodes) for part in self._parts))
        return [
            self._combined(episode, given) for episode, given in zip(episodes, zip(*values, strict=True), strict=True)
        ]

    def _begun(self, episode: Episode) -> bool:
        return self._decode is not None and is_opened_by(self._decode(episode.turns[-1].context[-_END:]))

    async def close(self) -> None:
        """Kills the processes and ends the connections. Abandoned threads keep running."""
        self._caller.close()
        await asyncio.gather(self._pools.close(), self._poster.close())

    @property
    def threads(self) -> ThreadPool:
        """The threads of functions that Python passed."""
        return self._pools.threads

    @property
    def pids(self) -> list[int]:
        """The process ids of the live workers."""
        return self._pools.pids

    def _combined(
        self, episode: Episode, values: Sequence[float | tuple[float, ...] | Failure | None]
    ) -> Scored | Failure:
        rewards: dict[str, float] = {}
        steps: dict[str, Any] = {}
        for part, given in zip(self._parts, values, strict=True):
            value, found = self._one(part, episode, given)
            steps |= found
            if isinstance(value, Failure):  # a sum without one of its parts is not the reward
                return msgspec.structs.replace(value, detail=f"{part.name}: {value.detail}")
            if value is not None:
                rewards[part.name] = value
        if not rewards:
            return Failure("reward_none", "no reward function applies to this row: all of them returned None for it")
        total = sum(part.weight * rewards[part.name] for part in self._parts if part.name in rewards)
        extracted = {
            part.name: part.extract(episode.last, self._begun(episode)) for part in self._parts if part.extract.kind
        }
        return usable(Scored(episode, total, rewards, extracted=extracted, **steps))

    def _one(
        self, part: RewardPart, episode: Episode, given: float | tuple[float, ...] | Failure | None
    ) -> tuple[float | Failure | None, dict[str, Any]]:
        """Returns the reward of a part, and the field of `Scored` for steps, if it scored any."""
        if not isinstance(given, tuple):
            return given, {}
        assert self._decode, "a run that scores steps has a tokenizer"
        returns = returns_of(given, part.form)
        weighed = [part.weight * returned for returned in returns]
        found = graded(episode, part.segments, given, returns=weighed, decode=self._decode)
        return (found, {}) if isinstance(found, Failure) else (returns[0], {"segments": found})


def _over_http(config: RewardConfig, poster: Poster) -> list[RewardPart]:
    """Raises ConfigError if a token cannot be had."""
    cut = config.extract_truncated
    return [
        *(
            RewardPart(
                name=endpoint.name,
                weight=endpoint.weight,
                ask=compared(service.call) if endpoint.compares else service.call,
                extract=Extractor(endpoint.extract, cut),
                segments=endpoint.segments,
                form=endpoint.form,
                what="service",
                kept=True,
            )
            for endpoint in config.services
            for service in [HttpService(endpoint, poster)]
        ),
        *(
            RewardPart(
                name=judge.name,
                weight=judge.weight,
                ask=Judge(judge, poster).call,
                extract=Extractor(judge.extract, cut),
                what="judge",
                kept=True,
            )
            for judge in config.judges
        ),
    ]
