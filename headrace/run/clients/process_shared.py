"""The trainer that clients share, in a worker process.

A dead process is replaced at once, but the adapters that it trained are lost with it: gradients and optimizers were only there. So
nothing is asked a second time, and whoever trained there gets an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from headrace.core.errors import HeadraceError, WorkerDied
from headrace.core.protocols import Job, Launcher, Worker
from headrace.core.weights import WeightUpdate
from headrace.run.clients.keeper import Keeper
from headrace.run.worker.worker_messages import SharedStart
from headrace.trainer.shared.calls import AdamStep, Checkpoint, PassReport, Publish, SharedLora, StepDone, TrainingPass

T = TypeVar("T")
WHO = "trainer"


class StateLost(HeadraceError):
    """The process that did a call has died, and its adapters with it."""


class ProcessSharedTrainer:
    def __init__(self, launcher: Launcher, max_deaths: int, lost: Callable[[str], None]) -> None:
        """`lost` is called with a sentence when all adapters are lost."""
        self._keeper = Keeper(launcher, Job("shared trainer", WHO), max_deaths, self, lambda method, payload: None)
        self._lost = lost
        self.dtype = ""
        """That of its computation; empty until it has started."""

    async def launch(self) -> None:
        """Starts the process. It imports its libraries while the caller does other work."""
        await self._keeper.launch()

    async def open(self, start: SharedStart) -> None:
        self._start = start
        await self._keeper.open()

    async def add(self, name: str, lora: SharedLora) -> None:
        await self._call("add", (name, lora), type(None))

    async def remove(self, name: str) -> None:
        await self._call("remove", name, type(None))

    async def run(self, call: TrainingPass) -> PassReport:
        return await self._call("run", call, PassReport)

    async def spoil(self, name: str, why: str) -> None:
        await self._call("spoil", (name, why), type(None))

    async def optim_step(self, call: AdamStep) -> StepDone:
        return await self._call("optim_step", call, StepDone)

    async def save(self, call: Checkpoint) -> None:
        await self._call("save", call, type(None))

    async def restore(self, call: Checkpoint) -> int:
        return await self._call("restore", call, int)

    async def publish(self, call: Publish) -> WeightUpdate:
        return await self._call("publish", call, WeightUpdate)

    async def watch(self) -> None:
        """Never returns; raises `WorkerDied` as soon as the trainer is given up."""
        await self._keeper.watch()

    def kill(self) -> None:
        self._keeper.kill()

    async def close(self) -> None:
        await self._keeper.close()

    # -- for the keeper -----------------------------------------------------------------------------------------------------

    async def begin(self, worker: Worker) -> None:
        self.dtype = await worker.call("start", self._start, str)

    async def resume_in(self, worker: Worker) -> None:
        """The new process has no adapters: those of the old one were lost."""

    def went_down(self, forgive: Callable[[], None] | None) -> None:
        """Does nothing: its calls belong to no ticket."""

    def died(self, how: str, deaths: int) -> None:
        self._lost(how)

    def given_up(self, error: Exception) -> None:
        self._lost(str(error))

    # -- inside -------------------------------------------------------------------------------------------------------------

    async def _call(self, method: str, payload: object, returns: type[T]) -> T:
        async def once(worker: Worker) -> T:
            try:
                return await worker.call(method, payload, returns)
            except WorkerDied as error:
                raise StateLost(str(error)) from None

        return await self._keeper.retrying(once)
