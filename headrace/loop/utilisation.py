"""Measures how busy the two pools were. Each pool counts its own working time."""

from __future__ import annotations

import asyncio
import contextlib

from headrace.core.errors import HeadraceError
from headrace.core.protocols import Engine
from headrace.core.reports import EngineStats
from headrace.facts.telemetry import Telemetry
from headrace.loop.turns import Turns

LAST_WORD = 30.0
"""Seconds in which the engine should answer after training. It answers between two passes."""


class Utilisation:
    """Idle shares of both pools between `start` and `stop`, which means training without loading and evaluation."""

    def __init__(self, engine: Engine, turns: Turns, telemetry: Telemetry) -> None:
        self._engine, self._turns = engine, turns
        self._waits, self._clock = telemetry.waits, telemetry.clock
        self._first = self._last = EngineStats()
        self._began = self._ended = 0.0
        self._worked_first = self._worked_last = 0.0

    async def start(self) -> None:
        self._first = self._last = await self._stats()
        self._began = self._ended = self._clock()
        self._worked_first = self._worked_last = self._turns.busy

    async def stop(self, patience: float = LAST_WORD) -> None:
        """Takes the engine's final statistics. If the engine is lost or hangs, those of its last report are used."""
        self._ended = self._clock()
        self._worked_last = self._turns.busy
        with contextlib.suppress(TimeoutError, HeadraceError):
            # Named, because the watchdog would take an unnamed wait for a hang; endless, because it has its own deadline.
            async with (
                asyncio.timeout(patience),
                self._waits.named("controller", "the engine's last word", endless=True),
            ):
                self._last = await self._engine.stats()

    async def _stats(self) -> EngineStats:
        async with self._waits.named("controller", "the engine's statistics"):
            return await self._engine.stats()

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    @property
    def engine_idle(self) -> float:
        busy = self._last.busy_seconds - self._first.busy_seconds
        return max(0.0, 1 - busy / self.seconds) if self.seconds else 0.0

    @property
    def trainer_idle(self) -> float:
        """The trainer's idle share. Work for other pipelines counts as busy."""
        busy = self._worked_last - self._worked_first
        return max(0.0, 1 - busy / self.seconds) if self.seconds else 0.0

    @property
    def prompt_tokens(self) -> int:
        return self._last.prompt_tokens - self._first.prompt_tokens

    @property
    def sampled_tokens(self) -> int:
        return self._last.sampled_tokens - self._first.sampled_tokens
