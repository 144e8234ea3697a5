"""A trainer in a worker process, or in several ranks, behind the protocol `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.batches import Batch
from headrace.durable.shared_directory import check_answer, probing
from headrace.errors import WorkerDied
from headrace.orchestration.clients.rank_group import trainer_worker
from headrace.orchestration.workers.worker_messages import TrainerReady, TrainerStart
from headrace.protocols import Launcher
from headrace.reports import SleepReport, TrainReport, TrialScores
from headrace.weights import WeightUpdate


class ProcessTrainer:
    """Protocol `Trainer`. A dead trainer cannot be replaced (its optimizer state is gone): the run stops and can be resumed."""

    def __init__(
        self, launcher: Launcher, start: TrainerStart, cores: Sequence[int] = (), shared: Path | None = None
    ) -> None:
        """`shared`: a directory that ranks elsewhere must see as this process does; None for children of this process."""
        self._start, self._shared = start, shared
        self._worker = trainer_worker(launcher, start, cores)

    async def open(self) -> TrainerReady:
        await self._worker.start()
        if not self._shared:
            return await self._worker.call("start", self._start, TrainerReady)
        with probing(self._shared) as probe:
            ready = await self._worker.call("start", msgspec.structs.replace(self._start, probe=probe), TrainerReady)
            check_answer(probe)
        return ready

    async def step(self, batch: Batch) -> TrainReport:
        return await self._worker.call("step", batch, TrainReport)

    async def copy(self, adapter: str = "") -> None:
        await self._worker.call("copy", adapter, type(None))

    async def publish(self, adapter: str = "") -> WeightUpdate:
        return await self._worker.call("publish", adapter, WeightUpdate)

    async def publish_shadow(self) -> WeightUpdate | None:
        return await self._worker.call("publish_shadow", None, WeightUpdate | None)  # type: ignore[arg-type]

    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        return await self._worker.call("score", (list(tokens), adapter), list[float])

    async def begin_trial(self, adapter: str = "") -> None:
        await self._worker.call("begin_trial", adapter, type(None))

    async def end_trial(self, pieces: Sequence[Sequence[int]], adapter: str = "", most: int = 0) -> TrialScores:
        return await self._worker.call("end_trial", ([list(piece) for piece in pieces], adapter, most), TrialScores)

    async def save(self, directory: Path, adapter: str = "") -> None:
        await self._worker.call("save", (_for_ranks(directory), adapter), type(None))

    async def reserve(self) -> None:
        """Does in advance what would delay the first steps; calls that come meanwhile wait for it."""
        await self._worker.call("reserve", None, type(None))

    async def sleep(self) -> SleepReport:
        return await self._worker.call("sleep", None, SleepReport)

    async def wake(self) -> SleepReport:
        return await self._worker.call("wake", None, SleepReport)

    async def watch(self) -> None:
        raise WorkerDied("trainer", await self._worker.watch())

    def kill(self) -> None:
        self._worker.kill()

    async def close(self) -> None:
        await self._worker.end()


def _for_ranks(directory: Path) -> str:
    """Ranks elsewhere have another working directory."""
    return str(directory.absolute())
