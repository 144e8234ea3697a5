"""Rewards that depend only on the prompt and the rollout's place. Some fail, some groups have no contrast, some take long.

They may come from a service behind HTTP that fails now and then. Its client, its retries and its log of scores are those of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.batches import Failure
from headrace.core.types import Episode, Prompt, Scored
from headrace.episodes.rollout import seed_of
from headrace.episodes.scoring.parts import PartCaller, RewardPart, ScoreLog
from headrace.episodes.scoring.services.config import ServiceConfig
from headrace.episodes.scoring.services.endpoint import HttpAnswer, HttpService
from headrace.facts.telemetry import Telemetry
from headrace.testing.fake_service import Misbehaviour, ScriptedPost
from headrace.testing.faultsim.chance import Chance
from headrace.testing.faultsim.faults import Disk

LATE = 40.0
"""Seconds: long enough for many other groups to be sampled and scored."""
FAULTS: tuple[Misbehaviour, ...] = ("down", "500", "busy", "html", "nan", "short", "half", "hang")
"""The faults of a request that may be gone when it is repeated."""


class SeededScorer:
    """Protocol `Scorer`."""

    def __init__(self, seed: int, chance: Chance, stragglers: int = 0) -> None:
        """`stragglers`: every `stragglers`-th prompt takes `LATE` seconds. 0 for none."""
        self._seed, self._chance, self._stragglers = seed, chance, stragglers
        self._scale = chance.random.choice([0.0, 0.1, 2.0])
        self._calls = 0

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        number, self._calls = self._calls, self._calls + 1
        if self._chance.due("scorer_hangs", number):
            await asyncio.sleep(1e9)
        await asyncio.sleep(self._chance.seconds(self._scale) + (LATE if self._straggles(prompt) else 0.0))
        values = await self._values(prompt, episodes)
        return [_scored(episode, value) for episode, value in zip(episodes, values, strict=True)]

    async def _values(self, prompt: Prompt, episodes: Sequence[Episode]) -> Sequence[float | None]:
        return [reward_of(self._seed, prompt.id, place) for place in range(len(episodes))]

    def _straggles(self, prompt: Prompt) -> bool:
        stream, _, number = prompt.id.partition("/")
        return bool(self._stragglers) and stream == "train" and int(number) % self._stragglers == 0

    async def close(self) -> None:
        pass


class ServedScorer(SeededScorer):
    """The rewards of `SeededScorer`, from a service."""

    def __init__(
        self, seed: int, chance: Chance, stragglers: int, telemetry: Telemetry, asked: Callable[[str, bool], None]
    ) -> None:
        """`asked` is called with the key of each request for training, and whether its scores have been recorded."""
        super().__init__(seed, chance, stragglers)
        config = ServiceConfig(name="seeded", url="http://service/", retries=len(FAULTS))
        self._log, self._asked = ScoreLog({"seeded": seed}), asked
        service = HttpService(config, _Service(seed, chance, asked))
        self._part = RewardPart(name="seeded", weight=1.0, ask=service.call, what="service", kept=True)
        self._caller = PartCaller(telemetry, self._log)
        self._telemetry = telemetry

    def open(self, directory: Path) -> None:
        self._log.open(directory, self._telemetry.warn)

    async def _values(self, prompt: Prompt, episodes: Sequence[Episode]) -> Sequence[float | None]:
        named = msgspec.structs.replace(prompt, columns={"id": prompt.id})
        values = await self._caller.call(self._part, named, episodes)
        assert not [value for value in values if isinstance(value, Failure)], f"single faults are made up for: {values}"
        self._asked(key_of(prompt.id, [list(episode.last.tokens) for episode in episodes]), True)
        # The service has no word for a reward that fails, which is -1 here.
        return [value if isinstance(value, float) and value >= 0 else None for value in values]


class AskedScores:
    """The requests of all lives. Checks C7: scores that were recorded are not asked for again."""

    def __init__(self) -> None:
        self._recorded: set[str] = set()
        self._disks: list[Disk] = []

    def begin(self, disk: Disk) -> Callable[[str, bool], None]:
        """Returns what a life calls with the key of each request, and whether its scores have been recorded."""
        lost = any(former.lost_power or former.was_full for former in self._disks)
        earlier = set() if lost else set(self._recorded)
        self._disks.append(disk)

        def heard(key: str, recorded: bool) -> None:
            if key and recorded and not disk.was_full:
                self._recorded.add(key)
            assert recorded or key not in earlier, f"C7: {key} is asked about again, though its scores were recorded"

        return heard


class _Service(ScriptedPost):
    def __init__(self, seed: int, chance: Chance, asked: Callable[[str, bool], None]) -> None:
        super().__init__(lambda body: _scores(seed, body))
        self._chance, self._heard, self._number = chance, asked, 0

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> HttpAnswer:
        number, self._number = self._number, self._number + 1
        fault = self._chance.due("service_fails", number)
        self._faults = iter([FAULTS[int(fault.share * len(FAULTS))] if fault else None])
        told = msgspec.json.decode(body)
        if told["id"]:
            self._heard(key_of(told["id"][0], told["completion_tokens"]), False)
        self.asked.clear()
        return await super().post(url, body, headers, seconds)


def _scores(seed: int, body: Mapping[str, Any]) -> list[float]:
    rewards = [reward_of(seed, prompt, place) for place, prompt in enumerate(body["id"])]
    return [-1.0 if reward is None else reward for reward in rewards]


def key_of(prompt: str, tokens: Sequence[Sequence[int]]) -> str:
    """The name of what is asked about a group; empty unless the group is one of training, which is asked about once."""
    return f"{prompt} {tokens}" if prompt.startswith("train/") else ""


def _scored(episode: Episode, reward: float | None) -> Scored | Failure:
    return Failure("reward_raised", "injected") if reward is None else Scored(episode, reward, {"seeded": reward})


def reward_of(seed: int, prompt: str, place: int) -> float | None:
    draw = seed_of(seed, "reward", prompt, place) % 100
    return None if draw < 5 else float(draw % 4)
