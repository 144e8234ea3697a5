"""Several replicas behind one protocol `Engine`. A new prompt goes to the replica with the fewest requests, and its group stays together,
so that the prompt is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.commands.plan.parts.engine import SimulatedEngine
from headrace.core.reports import EngineStats, LoadReport
from headrace.core.steps import SoFar, StepOutput
from headrace.core.types import Completion, Request
from headrace.core.weights import WeightUpdate


class Replicas:
    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        assert engines
        self._engines = list(engines)
        self.capabilities = engines[0].capabilities
        self._homes: dict[tuple[int, ...], tuple[SimulatedEngine, int]] = {}
        """The replica and the number of each prompt's requests."""

    @property
    def version(self) -> int:
        return min(engine.version for engine in self._engines)

    async def generate(self, request: Request) -> Completion:
        key = request.prompt
        engine, users = self._homes.get(key) or (min(self._engines, key=_burden), 0)
        self._homes[key] = engine, users + 1
        try:
            return await engine.generate(request)
        finally:
            engine, users = self._homes.pop(key)
            if users > 1:
                self._homes[key] = engine, users - 1

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        reports = await asyncio.gather(*(engine.load(update, parts) for engine in self._engines))
        return max(reports, key=lambda report: report.verify_seconds)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        return await self._engines[0].score(tokens, adapter)

    async def drain(self) -> None:
        await asyncio.gather(*(engine.drain() for engine in self._engines))

    async def resume(self) -> None:
        for engine in self._engines:
            await engine.resume()

    async def abort(self) -> None:
        for engine in self._engines:
            await engine.abort()

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        names = None if among is None else list(among)
        return {name: transcript for engine in self._engines for name, transcript in engine.unfinished(names).items()}

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        for engine in self._engines:
            engine.listen(listener)

    async def stats(self) -> EngineStats:
        return self.snapshot()

    def snapshot(self) -> EngineStats:
        """Returns totals; `busy_seconds` is the mean, so that it remains a share of the time."""
        all_of = [engine.snapshot() for engine in self._engines]
        count = len(all_of)
        return EngineStats(
            running=sum(stats.running for stats in all_of),
            waiting=sum(stats.waiting for stats in all_of),
            kv_used=sum(stats.kv_used for stats in all_of) / count,
            sampled_tokens=sum(stats.sampled_tokens for stats in all_of),
            prompt_tokens=sum(stats.prompt_tokens for stats in all_of),
            steps=sum(stats.steps for stats in all_of),
            busy_seconds=sum(stats.busy_seconds for stats in all_of) / count,
            version=self.version,
            swaps=all_of[0].swaps,
        )

    async def watch(self) -> None:
        """Never returns: `testing/faultsim/lives.py` simulates deaths."""
        await asyncio.Event().wait()

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _burden(engine: SimulatedEngine) -> int:
    return engine.burden
