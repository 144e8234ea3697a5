"""A trainer in a worker process, or in several ranks, behind the protocol `Trainer`.

One that does not answer a call within `watch.stop_after` (a collective that never ends, a disk that is gone) counts as dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.core.batches import Batch
from headrace.core.errors import WorkerDied
from headrace.core.protocols import Launcher
from headrace.core.reports import Captured, SleepReport, TrainReport, TrialScores
from headrace.core.weights import WeightUpdate
from headrace.durable.shared_directory import check_answer, probing
from headrace.facts.waits import Waits
from headrace.run.clients.rank_group import trainer_worker
from headrace.run.worker.worker_messages import TrainerReady, TrainerStart

T = TypeVar("T")
WHO = "trainer"


class ProcessTrainer:
    """Protocol `Trainer`. A dead trainer cannot be replaced (its optimizer state is gone): the run stops and can be resumed."""

    def __init__(
        self,
        launcher: Launcher,
        start: TrainerStart,
        cores: Sequence[int] = (),
        shared: Path | None = None,
        *,
        waits: Waits | None = None,
    ) -> None:
        """`shared`: a directory that ranks elsewhere must see as this process does; None for children of this process. `waits`: they know how long
        an answer may take; without them it takes as long as it takes."""
        self._start, self._shared, self._waits = start, shared, waits
        self._worker = trainer_worker(launcher, start, cores)

    async def open(self) -> TrainerReady:
        await self._worker.start()
        if not self._shared:
            return await self._call("start", self._start, TrainerReady)
        with probing(self._shared) as probe:
            ready = await self._call("start", msgspec.structs.replace(self._start, probe=probe), TrainerReady)
            check_answer(probe)
        return ready

    async def step(self, batch: Batch) -> TrainReport:
        return await self._call("step", batch, TrainReport)

    async def copy(self, adapter: str = "") -> None:
        await self._call("copy", adapter, type(None))

    async def publish(self, adapter: str = "") -> WeightUpdate:
        return await self._call("publish", adapter, WeightUpdate)

    async def publish_shadow(self) -> WeightUpdate | None:
        return await self._call("publish_shadow", None, WeightUpdate | None)  # type: ignore[arg-type]

    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        return await self._call("score", (list(tokens), adapter), list[float])

    async def begin_trial(self, adapter: str = "") -> None:
        await self._call("begin_trial", adapter, type(None))

    async def end_trial(self, pieces: Sequence[Sequence[int]], adapter: str = "", most: int = 0) -> TrialScores:
        return await self._call("end_trial", ([list(piece) for piece in pieces], adapter, most), TrialScores)

    async def capture(self, adapter: str = "") -> Captured:
        return await self._call("capture", adapter, Captured)

    async def save(self, directory: Path, adapter: str = "") -> None:
        await self._call("save", (_for_ranks(directory), adapter), type(None))

    async def reserve(self) -> None:
        """Does in advance what would delay the first steps; calls that come meanwhile wait for it."""
        await self._call("reserve", None, type(None))

    async def sleep(self) -> SleepReport:
        return await self._call("sleep", None, SleepReport)

    async def wake(self) -> SleepReport:
        return await self._call("wake", None, SleepReport)

    async def watch(self) -> None:
        raise WorkerDied(WHO, await self._worker.watch())

    def kill(self) -> None:
        self._worker.kill()

    async def close(self) -> None:
        await self._worker.end()

    async def _call(self, method: str, payload: Any, returns: type[T]) -> T:
        async with self._deadline(method):
            return await self._worker.call(method, payload, returns)

    def _deadline(self, method: str) -> AbstractAsyncContextManager[None]:
        if self._waits is None:
            return nullcontext()
        return self._waits.answer(WHO, method, owner="start" if method == "start" else "controller")


def _for_ranks(directory: Path) -> str:
    """Ranks elsewhere have another working directory."""
    return str(directory.absolute())
