"""A trainer without a model, for tests and simulations: settable speed, failures, and a record of what it trained."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.core.batches import Batch
from headrace.core.errors import CheckpointError, WorkerDied
from headrace.core.reports import Captured, LagStats, Noise, SleepReport, TrainReport, TrialScores
from headrace.core.weights import AdapterSpec, WeightUpdate, trial_version


@dataclass
class FakeTrainer:
    seconds_per_step: float = 0.1
    _: KW_ONLY
    publish_seconds: float = 0.0
    skip: Callable[[int], bool | str] = lambda attempt: False
    """Returns for each attempted step (counted from 0) whether its gradient is non-finite, or another reason for skipping it."""
    full: Callable[[int], bool] = lambda attempt: False
    """Returns for each attempted save (counted from 0) whether the disk is full."""
    capture_seconds: float = 0.0
    save_seconds: float = 0.0
    short: str = ""
    """The reason why it makes no copies for checkpoints; empty if it makes them."""
    sleep_seconds: float = 0.0
    """Seconds that it takes to fall asleep, and to wake."""
    lags: tuple[LagStats, ...] = ()
    noise: Noise | None = None
    """Reported with every step, as `lags`."""
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions: dict[str, int] = {}
        """Versions by adapter; the empty name stands for all weights."""
        self._copied: dict[str, int] = {}
        self._captured: dict[str, int] = {}
        self._writing: set[str] = set()
        self._tried: dict[str, int] = {}
        self._attempts = self.saves = 0
        self._asleep = False
        self._died: asyncio.Future[None] | None = None

    @property
    def version(self) -> int:
        return self.versions.get("", 0)

    async def step(self, batch: Batch) -> TrainReport:
        assert not self._asleep, "a step of a trainer that sleeps"
        await asyncio.sleep(self.seconds_per_step)
        self._attempts += 1
        tokens = sum(len(row.tokens) for row in batch.rows)
        reported: dict[str, Any] = {"loss_tokens": tokens, "lags": self.lags, "noise": self.noise}
        if reason := self.skip(self._attempts - 1):
            name = reason if isinstance(reason, str) else "nonfinite_gradient"
            return TrainReport(batch.step, batch.step, skipped=name, **reported)
        self.batches.append(batch)
        version = self.versions[batch.adapter] = self.versions.get(batch.adapter, 0) + 1
        return TrainReport(batch.step, version, seconds=self.seconds_per_step, **reported)

    async def copy(self, adapter: str = "") -> None:
        self._copied[adapter] = self.versions.get(adapter, 0)

    async def publish(self, adapter: str = "") -> WeightUpdate:
        version = self._copied.pop(adapter, self.versions.get(adapter, 0))
        spec = AdapterSpec(adapter, 1, 1.0) if adapter else None
        await asyncio.sleep(self.publish_seconds)
        kind: Literal["adapter", "full"] = "adapter" if adapter else "full"
        return WeightUpdate(
            version=version,
            kind=kind,
            fingerprint=f"fake-{version}",
            nbytes=0,
            seconds=self.publish_seconds,
            adapter=spec,
        )

    async def publish_shadow(self) -> WeightUpdate | None:
        return None

    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    async def begin_trial(self, adapter: str = "") -> None:
        version = self._tried[adapter] = self.versions.get(adapter, 0)
        self.versions[adapter] = trial_version(version)

    async def end_trial(self, pieces: Sequence[Sequence[int]], adapter: str = "", most: int = 0) -> TrialScores:
        self.versions[adapter] = self._tried.pop(adapter)
        return TrialScores([-1.0] * sum(len(piece) - 1 for piece in pieces), {})

    async def sleep(self) -> SleepReport:
        await asyncio.sleep(self.sleep_seconds)
        self._asleep = True
        return SleepReport(self.sleep_seconds, memory=1 << 20)

    async def wake(self) -> SleepReport:
        await asyncio.sleep(self.sleep_seconds)
        self._asleep = False
        return SleepReport(self.sleep_seconds, memory=1 << 20)

    async def capture(self, adapter: str = "") -> Captured:
        await asyncio.sleep(self.capture_seconds)
        if adapter in self._writing:
            raise CheckpointError("two checkpoints at once (fake)")
        if not self.short:
            self._captured[adapter] = self.versions.get(adapter, 0)
        return Captured(short=self.short)

    async def save(self, directory: Path, adapter: str = "") -> None:
        version = self._captured.pop(adapter, None)
        self._writing.add(adapter)
        try:
            await asyncio.sleep(self.save_seconds)
            self.saves += 1
            if self.full(self.saves - 1):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = self.versions.get(adapter, 0) if version is None else version
            (directory / "fake_trainer.txt").write_text(str(written))
        finally:
            self._writing.discard(adapter)

    async def watch(self) -> None:
        self._died = asyncio.get_running_loop().create_future()
        await self._died

    def die(self) -> None:
        assert self._died is not None
        self._died.set_exception(WorkerDied("trainer", "was killed (fake)"))

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass
