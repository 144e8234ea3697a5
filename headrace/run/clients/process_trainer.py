"""A trainer in a worker process, or in several ranks, behind the protocol `Trainer`.

One that does not answer a call within `watch.stop_after` (a collective that never ends, a disk that is gone) counts as dead.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from headrace.core.batches import Batch
from headrace.core.errors import ConfigError, HeadraceError, RankUnreachable, WorkerDied
from headrace.core.protocols import Job, Launcher, Worker
from headrace.core.reports import Captured, SleepReport, TrainReport, TrialScores
from headrace.core.weights import WeightUpdate
from headrace.durable.shared_directory import check_answer, probing
from headrace.facts.waits import Waits
from headrace.processes.health.family import Child, current_family
from headrace.processes.health.owned_directory import OwnedDirectory
from headrace.processes.health.stacks import ask, is_stopped
from headrace.processes.wire import pack_payload
from headrace.run.clients.keeper import Keeper
from headrace.run.worker.step_messages import send_shares
from headrace.run.worker.worker_messages import SharedStart, TrainerReady, TrainerStart
from headrace.trainer.config import TrainConfig
from headrace.trainer.dealing.deal import Dealing, dealing_of
from headrace.trainer.dealing.share import PackedShare, shares_of
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.shared.calls import AdamStep, Checkpoint, PassReport, Publish, SharedLora, StepDone, TrainingPass

# --- The ranks of a trainer, called as one worker.
#
# Each is an ordinary worker. Every rank is called, with the same frame or with its own rows, and rank 0's answer counts. Ranks wait for each other in
# collectives, so none of them goes on alone: when one has died, has failed on its own, or is stopped, the others are killed, and the group
# has ended for the reason that the first one gave.


T = TypeVar("T")

STOPPED = 5
"""Seconds for which a rank may be stopped by a signal or a debugger."""

TOGETHER = 5.0
"""Seconds after the failure of one rank in which the others may fail or answer too, beside those in which the loss of a rank is noticed (`late`).
All of them fail alike where a file is damaged or a setting cannot work; a rank that failed alone leaves the others in a collective, and then the
group is lost. One that failed because another has died must not count as the one that failed."""

ALONE = {"save"}
"""Calls in which no rank waits for another: each writes files of its own, and the one whose disk is full fails long before the others end."""


def trainer_worker(launcher: Launcher, start: TrainerStart, cores: Sequence[int]) -> Worker:
    """The worker of a trainer: a process, or as many as it has ranks."""
    inherited = [*start.transport.inherited, *(start.shadow.transport.inherited if start.shadow else ())]
    if start.ranks == 1:
        return launcher.worker(Job("trainer", "trainer", cores, inherited), lambda method, payload: None)
    return RankGroup(launcher, start.ranks, cores, inherited)


class RankGroup:
    """Protocol `Worker`."""

    left = False

    def __init__(self, launcher: Launcher, ranks: int, cores: Sequence[int], inherited: Sequence[int]) -> None:
        self._names = [f"trainer rank {rank}" for rank in range(ranks)]
        self._workers = [
            launcher.worker(Job("trainer", name, cores[rank::ranks], inherited), lambda method, payload: None)
            for rank, name in enumerate(self._names)
        ]
        self._family = current_family()
        self._meeting: OwnedDirectory | None = None
        """The directory in which they find each other."""
        self._ended: asyncio.Future[str] | None = None
        self._watching: list[asyncio.Task[None]] = []
        self.notes: list[str] = []
        """Sentences about how the ranks lie on machines, for people."""

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def door(self) -> str:
        return self._workers[0].door

    @property
    def late(self) -> float:
        return max(worker.late for worker in self._workers)

    async def start(self) -> None:
        """Returns when all have started: the ones elsewhere come when they like. Raises WorkerDied if one is lost before the last has come."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._meeting = OwnedDirectory("ranks")
        self._watching = [loop.create_task(self._find_stopped())]
        starts = [loop.create_task(self._begin(worker)) for worker in self._workers]
        everyone = asyncio.gather(*starts)
        try:
            either: list[asyncio.Future[Any]] = [everyone, self._ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not everyone.done():
                raise WorkerDied("trainer", await self.watch())
            await everyone
            self._workers, came = by_machine(self._workers), self._workers
            if self._workers != came:
                seats = [self._names[came.index(worker)] for worker in self._workers]
                numbers = ", ".join(f"{seat} is rank {rank}" for rank, seat in enumerate(seats))
                self.notes = [f"ranks are numbered by machine, not in the order in which they came: {numbers}"]
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _begin(self, worker: Worker) -> None:
        await worker.start()
        self._watching.append(asyncio.get_running_loop().create_task(self._watch(worker)))

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        if isinstance(payload, TrainerStart):
            self.notes += apart(list(map(machine_of, self._workers)), payload)
        else:
            payload = pack_payload(payload)  # once
        return await self._call(method, [self._own(payload, rank) for rank in range(len(self._workers))], returns)

    async def step(self, number: int, shares: Sequence[PackedShare], share_of: Callable[[int], int]) -> TrainReport:
        """Sends every rank the rows of its share. No rank begins the step before all have theirs: it would wait in a collective for one that
        cannot be sent them."""
        own = [share_of(rank) for rank in range(len(self._workers))]
        together = [[w for w, its in zip(self._workers, own, strict=True) if its == one] for one in range(len(shares))]
        try:
            await send_shares(shares, number, together)
        except WorkerDied:
            raise WorkerDied("trainer", await self.watch()) from None
        heads = [pack_payload((number, share.head)) for share in shares]
        return await self._call("step", [heads[share_of(rank)] for rank in range(len(self._workers))], TrainReport)

    async def _call(self, method: str, payloads: Sequence[Any], returns: type[T]) -> T:
        """Calls every rank. Raises the error of one that failed."""
        calls: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(worker.call(method, payload, Any if rank else returns))
            for rank, (worker, payload) in enumerate(zip(self._workers, payloads, strict=True))
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(_failed(call) for call in calls):
                await self._settle(calls, None if method in ALONE else TOGETHER + self.late)
            answer: T = calls[0].result()
            return answer
        finally:
            for call in calls:
                call.cancel()

    def _own(self, payload: Any, rank: int) -> Any:
        """The payload of a rank: everyone's, except at the start for its own number, and how many share its machine."""
        if not isinstance(payload, TrainerStart):
            return payload
        assert self._meeting
        machines = list(map(machine_of, self._workers))
        place, beside = self.door or f"{self._meeting.path}/store", machines.count(machines[rank])
        return msgspec.structs.replace(payload, rank=rank, meeting=place, beside=beside)

    async def _settle(self, calls: Sequence[asyncio.Future[Any]], timeout: float | None) -> None:
        """Raises the error of a call that failed on some rank. `timeout`: seconds after which ranks that have not answered are lost; None: they are waited
        for."""
        assert self._ended is not None
        everyone: asyncio.Future[Any] = asyncio.gather(*calls, return_exceptions=True)
        some: list[asyncio.Future[Any]] = [everyone, self._ended]
        await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED, timeout=timeout)
        errors = [error for call in calls if (error := _failed(call))]
        if cut_off := next((error for error in errors if isinstance(error, RankUnreachable)), None):
            await asyncio.wait([self._ended], timeout=TOGETHER + self.late)  # of the one that is not reached
            self._lose(f"lost the connection between two ranks, which both still run: {cut_off}")
        if self._ended.done() or any(isinstance(error, WorkerDied) for error in errors):
            raise WorkerDied("trainer", await self.watch())
        if not everyone.done():
            rank = next(rank for rank, call in enumerate(calls) if _failed(call))
            self._lose(f"of rank {rank} failed while others waited for it: {errors[0]}")
        everyone.cancel()
        raise errors[0]

    def push(self, method: str, payload: Any) -> None:
        for worker in self._workers:
            worker.push(method, payload)

    async def watch(self) -> str:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    async def end(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*(worker.end() for worker in self._workers))
        if self._meeting:
            self._meeting.remove()

    # -- one of them is lost --------------------------------------------------------------------------------------------

    async def _watch(self, worker: Worker) -> None:
        how = await worker.watch()
        self._lose(f"of rank {self._workers.index(worker)} {how}")

    async def _find_stopped(self) -> None:
        """A stopped process closes no connection, and the others would wait for it in a collective."""
        seconds: dict[Child, int] = {}
        while True:
            await asyncio.sleep(1.0)
            mine = [child for child in self._family.children() if child.who in self._names]
            seconds = {child: seconds.get(child, 0) + 1 for child in mine if is_stopped(child.pid)}
            for child in (child for child, count in seconds.items() if count >= STOPPED):
                (account,) = await asyncio.to_thread(ask, [child])
                rank = self._names.index(child.who)
                self._lose(f"of rank {rank} did not run for {STOPPED} seconds and was killed ({account.brief})")

    def _lose(self, how: str) -> None:
        """Ends the group. Only the first reason counts: the others died of it."""
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(how)
            self.kill()


def machine_of(worker: Worker) -> str:
    """The address of a worker's machine; empty for a child of the run."""
    return worker.door.rpartition(":")[0]


def by_machine(workers: Sequence[Worker]) -> list[Worker]:
    """The workers in the order of ranks: by machines, in the order in which these came, and on each by the numbers that they have there. Neighbours work together most
    closely, and workers of two machines that start at once come alternately."""
    machines = list(dict.fromkeys(map(machine_of, workers)))
    return sorted(workers, key=lambda worker: (machines.index(machine_of(worker)), worker.local_rank))


def apart(machines: Sequence[str], start: TrainerStart) -> Iterator[str]:
    """Yields sentences about ranks that exchange much for every layer and are on different machines. `machines`: of each rank. Raises ConfigError where
    layers are split between machines."""
    parallel = ParallelConfig(**start.train.get("parallel", {}))
    here = ", ".join(f"{machines.count(machine)} on {machine}" for machine in dict.fromkeys(machines))
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "expert": parallel.expert}
    for name, size in sizes.items():
        groups = (machines[first : first + size] for first in range(0, len(machines), size))
        if all(len(set(group)) == 1 for group in groups):
            continue
        asked = f"train.parallel.{name} = {size}"
        if name == "tensor":
            raise ConfigError(
                f"{asked} lets {size} ranks compute every layer together, and they would be on different machines (ranks: {here}); start a multiple of "
                f"{size} ranks on each machine, or raise train.parallel.shard instead of tensor"
            )
        what = "tokens travel to their experts" if name == "expert" else "keys and values travel"
        yield (
            f"{asked} is spread over machines (ranks: {here}): {what} between them in every layer, so that the network may be what the trainer waits for; "
            f"a multiple of {size} ranks on each machine avoids it"
        )


def _failed(call: asyncio.Future[Any]) -> BaseException | None:
    return call.exception() if call.done() and not call.cancelled() else None


# --- process trainer ------------------------------------------------------------


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
        self._parallel = TrainConfig(**start.train).parallel
        self._packed, self._steps = True, itertools.count(1)

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about how the ranks lie on machines."""
        return self._worker.notes if isinstance(self._worker, RankGroup) else ()

    async def open(self) -> TrainerReady:
        ready = await self._opened()
        self._packed = ready.packed
        return ready

    async def _opened(self) -> TrainerReady:
        await self._worker.start()
        if not self._shared:
            return await self._call("start", self._start, TrainerReady)
        with probing(self._shared) as probe:
            ready = await self._call("start", msgspec.structs.replace(self._start, probe=probe), TrainerReady)
            check_answer(probe)
        return ready

    async def step(self, batch: Batch) -> TrainReport:
        async with self._deadline("step"):
            number, shares = next(self._steps), await asyncio.to_thread(shares_of, batch, self._dealing(batch.adapter))
            if isinstance(self._worker, RankGroup):
                return await self._worker.step(number, shares, self._parallel.share_of)
            await send_shares(shares, number, [[self._worker]])
            return await self._worker.call("step", (number, shares[0].head), TrainReport)

    def _dealing(self, adapter: str) -> Dealing:
        """How the rows of a step are dealt to ranks."""
        own = self._start.adapters.get(adapter)
        train = TrainConfig(**(own.train if own else self._start.train))
        return dealing_of(self._parallel, train.microbatch, self._packed, train.minibatches)

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

    async def export(self, directory: Path, dtype: Literal["bfloat16", "float32"], adapter: str = "") -> None:
        """Writes a directory that `transformers` loads, with an adapter merged in. Raises HeadraceError where the disk does not take it."""
        await self._call("export", (_for_ranks(directory), dtype, adapter), type(None))

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


# --- The trainer that clients share, in a worker process.
#
# A dead process is replaced at once, but the adapters that it trained are lost with it: gradients and optimizers were only there. So
# nothing is asked a second time, and whoever trained there gets an error.


class StateLost(HeadraceError):
    """The process that did a call has died, and its adapters with it."""


class ProcessSharedTrainer:
    def __init__(self, launcher: Launcher, max_deaths: int, lost: Callable[[str], None]) -> None:
        """`lost` is called with a sentence when all adapters are lost."""
        self._keeper = Keeper(launcher, Job("shared trainer", WHO), max_deaths, self, lambda method, payload: None)
        self._lost = lost
        self.dtype = ""
        """The type of its computation; empty until it has started."""

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
