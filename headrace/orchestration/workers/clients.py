"""Engine and trainer as the pipeline sees them, when they live in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from headrace.engine.streaming import check_parts
from headrace.errors import HeadraceError, WorkerDied
from headrace.observe.facts import EngineSample, WorkerLost
from headrace.orchestration.workers.messages import EngineStart, TrainerReady, TrainerStart
from headrace.orchestration.workers.process import Worker
from headrace.orchestration.workers.wire import Frame, unpack
from headrace.protocols import Observer
from headrace.reports import Capabilities, EngineStats, LoadReport, TrainReport
from headrace.steps import Finished, StepOutput, Transcript, write_down
from headrace.types import Batch, Completion, Request, scoring
from headrace.weights import WeightUpdate


class ProcessTrainer:
    """Protocol `Trainer`. A dead trainer cannot be replaced (its optimizer state is gone): the run stops and can be resumed."""

    def __init__(self, start: TrainerStart, cores: Sequence[int], weights_fd: int, log: Path) -> None:
        self._start, self._cores, self._weights_fd = start, cores, weights_fd
        self.worker = Worker("trainer", log)
        self.after_publish: Callable[[], Awaitable[None]] | None = None
        """Whoever else gets weights from here is served behind the run's engine (`teaching.SelfTeaching`)."""

    async def open(self) -> TrainerReady:
        await self.worker.start("trainer", [self._weights_fd], self._cores)
        ready: TrainerReady = await self.worker.call("start", self._start, TrainerReady)
        return ready

    async def step(self, batch: Batch) -> TrainReport:
        return await self.worker.call("step", batch, TrainReport)

    async def publish(self, adapter: str = "") -> WeightUpdate:
        update = await self.worker.call("publish", adapter, WeightUpdate)
        if self.after_publish:
            await self.after_publish()
        return update

    async def publish_shadow(self) -> WeightUpdate | None:
        """The student's older self, where a new version of it is due."""
        return await self.worker.call("publish_shadow", None, WeightUpdate | None)  # type: ignore[arg-type]

    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        return await self.worker.call("score", (list(tokens), adapter), list[float])

    async def save(self, directory: Path, adapter: str = "") -> None:
        await self.worker.call("save", (str(directory), adapter), type(None))

    async def watch(self) -> None:
        raise WorkerDied("trainer", await self.worker.ended())

    async def close(self) -> None:
        await self.worker.close()


T = TypeVar("T")

TOTALS = (
    "sampled_tokens", "prompt_tokens", "steps", "busy_seconds", "asked_tokens", "cached_tokens", "recomputed_tokens", "swaps",
    "preemptions",
)  # fmt: skip
"""Statistics that count from the start of a process."""


@dataclass
class _Pending(Transcript):
    """A request under way: what has been told of it is all that a new process needs to go on with it."""

    done: asyncio.Future[Completion] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    aborted: bool = False
    """It is to end; no other process goes on with it."""

    def reissue(self) -> Request:
        return msgspec.structs.replace(
            self.request,
            prefix=(*self.request.prefix, *self.tokens),
            prompt_logprobs=self.request.prompt_logprobs and self.scores is None,
        )

    def finish(self, end: Finished) -> None:
        if not self.done.done():
            self.end = end
            self.done.set_result(self.completion(end))

    def interrupt(self) -> None:
        self.finish(Finished(self.request.id, "interrupted"))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class ProcessEngine:
    """Protocol `Engine`. A dead process is replaced at once: current weights first, then every request from its prefix."""

    def __init__(
        self,
        cores: Sequence[int],
        weights_fd: int,
        log: Path,
        max_deaths: int,
        observer: Observer,
        clock: Callable[[], float],
        who: str = "engine",
        make_worker: Callable[[str, Path, Callable[[Frame], None] | None], Worker] = Worker,
    ) -> None:
        """`who`: in what is told of it; that of the run is `engine`. `make_worker`: what it is a client of."""
        self._make_worker = make_worker
        self._who, self._cores, self._weights_fd = who, cores, weights_fd
        self._max_deaths, self._observer, self._clock, self._log = max_deaths, observer, clock, log
        self._pending: dict[str, _Pending] = {}
        self._left: dict[str, _Pending] = {}
        """What was under way when the engine was given up."""
        self._listeners: list[Callable[[bytes], None]] = []
        self._wanted: dict[str, WeightUpdate] = {}
        """The newest weights by adapter; the base model's go by the empty name."""
        self._live: dict[str, LoadReport] = {}
        self._held: Literal["", "pause", "drain"] = ""
        self._scorings = itertools.count()
        self._deaths = 0
        self._gave_up: asyncio.Future[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._earlier = EngineStats()
        """What dead processes had done, so that totals never go back."""
        self._latest = EngineStats()
        self.capabilities = Capabilities(context_length=0)
        self.worker = make_worker(who, log, None)

    async def launch(self) -> None:
        """Starts the process, which imports what it needs beside whatever else goes on."""
        self.worker = self._make_worker(self._who, self._log, self._on_push)
        await self.worker.start("engine", [self._weights_fd], self._cores)

    async def open(self, start: EngineStart) -> None:
        self._start = start
        self._gave_up = asyncio.get_running_loop().create_future()
        await self._begin()
        self._up.set()
        self._keeping = asyncio.get_running_loop().create_task(self._keep_alive())

    async def generate(self, request: Request) -> Completion:
        await self._until_up()
        if request.id in self._pending:
            raise ValueError(f"a request {request.id} is here already; give every request an id of its own")
        pending = self._pending[request.id] = _Pending(request)
        self._send("add", request)
        try:
            return await pending.done
        except asyncio.CancelledError:
            self._send("cancel", request.id)
            raise
        finally:
            del self._pending[request.id]

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        check_parts(update, parts)
        name = update.adapter.name if update.adapter else ""
        before = self._wanted.get(name)
        self._wanted[name] = update
        try:
            return await self._retrying(lambda worker: self._load(worker, name, update, parts))
        except (HeadraceError, ValueError):
            if before is None:  # refused: a process that is respawned has no use for it
                del self._wanted[name]
            else:
                self._wanted[name] = before
            raise

    async def unload(self, adapter: str) -> None:
        await self._retrying(lambda worker: worker.call("unload", adapter, type(None)))
        self._wanted.pop(adapter, None)
        self._live.pop(adapter, None)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        return await self.generate(scoring(f"score/{next(self._scorings)}", tokens, priority=-1, adapter=adapter))

    async def pause(self) -> None:
        self._held = "pause"
        await self._control("pause")

    async def drain(self) -> None:
        self._held = "drain"
        await self._control("drain")

    async def resume(self) -> None:
        self._held = ""
        await self._control("resume")

    async def abort(self) -> None:
        for pending in self._pending.values():
            pending.aborted = True
        if self._up.is_set():
            with contextlib.suppress(WorkerDied):  # then the sentinel ends them
                await self.worker.call("abort", None, type(None))
        else:
            self._interrupt_aborted()

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, Transcript]:
        here = self._left or self._pending
        return {name: here[name].copy() for name in (list(here) if among is None else among) if name in here}

    def listen(self, listener: Callable[[bytes], None]) -> None:
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[bytes], None]) -> None:
        self._listeners.remove(listener)

    async def _control(self, method: str) -> None:
        await self._retrying(lambda worker: worker.call(method, None, type(None)))

    async def stats(self) -> EngineStats:
        self._latest = await self._retrying(lambda worker: worker.call("stats", None, EngineStats))
        return self._totals()

    async def watch(self) -> None:
        assert self._gave_up is not None
        await asyncio.shield(self._gave_up)

    async def close(self) -> None:
        if self._keeping:
            self._keeping.cancel()
        await self.worker.close()

    # -- inside ---------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self.capabilities = await self.worker.call("start", self._start, Capabilities)

    async def _load(self, worker: Worker, name: str, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """A process that was respawned meanwhile has been given the newest update already."""
        if name not in self._live or self._live[name].version != update.version:
            self._live[name] = await worker.call("load", (update, parts), LoadReport)
        return self._live[name]

    async def _retrying(self, ask: Callable[[Worker], Awaitable[T]]) -> T:
        """Asks again after a respawn."""
        while True:
            await self._until_up()
            worker = self.worker
            try:
                return await ask(worker)
            except WorkerDied:
                if worker is self.worker:
                    self._up.clear()

    async def _until_up(self) -> None:
        """Returns with a process that is there at this very moment. Raises what ended the engine for good."""
        assert self._gave_up is not None
        while not (self._up.is_set() or self._gave_up.done()):  # it may have died again before this task has its turn
            up: asyncio.Future[Any] = asyncio.ensure_future(self._up.wait())
            await asyncio.wait([self._gave_up, up], return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
        if self._gave_up.done():
            self._gave_up.result()

    async def _keep_alive(self) -> None:
        """The sentinel: notices the end of the process at once and replaces it, `max_deaths` times."""
        try:
            while True:
                how = await self.worker.ended()
                self._up.clear()
                self._deaths += 1
                await self.worker.close()
                self._observer.record(WorkerLost(self._clock(), self._who, how, self._deaths, len(self._pending)))
                if self._deaths > self._max_deaths:
                    raise WorkerDied(self._who, f"{how}; it was its death no. {self._deaths} (engine.max_deaths allows "
                                     f"{self._max_deaths})")  # fmt: skip
                await self._revive()
        except (
            Exception
        ) as error:  # nobody else hears of what ends this task, and all who wait for the engine would wait on
            self._fail(error if isinstance(error, HeadraceError) else _irreplaceable(self._who, error))

    async def _revive(self) -> None:
        """Raises WorkerDied where no process can be started. One that dies while it starts counts as a death."""
        self._earlier, self._latest = self._totals(), EngineStats()
        await self.launch()
        try:
            await self._begin()
            self._live = {}
            for name, update in self._wanted.items():  # the base model's came first
                await self._load(self.worker, name, update)
        except WorkerDied:
            return  # died again while starting: the loop counts it
        self._interrupt_aborted()
        for pending in self._pending.values():
            if pending.request.fork:  # the cache entries that it went on from are gone
                pending.interrupt()
            elif not pending.done.done():
                self._send("add", pending.reissue())
        if self._held:
            self._send(self._held, None)
        self._up.set()

    def _interrupt_aborted(self) -> None:
        for pending in self._pending.values():
            if pending.aborted:
                pending.interrupt()

    def _fail(self, error: Exception) -> None:
        assert self._gave_up is not None
        if self._gave_up.done():
            return
        self._gave_up.set_exception(error)
        self._gave_up.exception()  # whoever watches raises it; nobody watching is no error
        self._left = dict(self._pending)
        for pending in self._pending.values():
            pending.fail(error)

    def _send(self, method: str, payload: object) -> None:
        with contextlib.suppress(WorkerDied):  # the sentinel re-issues what is pending
            self.worker.channel.push(method, payload)

    def _on_push(self, frame: Frame) -> None:
        if frame.method == "output":
            self._on_output(frame.payload)
        elif frame.method == "stats":
            self._latest = unpack(frame.payload, EngineStats)
            self._observer.record(EngineSample(self._clock(), self._totals()))
        elif frame.method == "refused":
            request_id, message = unpack(frame.payload, tuple[str, str])
            if pending := self._pending.get(request_id):
                pending.fail(ValueError(message))

    def _on_output(self, told: msgspec.Raw) -> None:
        try:
            for listener in self._listeners:
                listener(bytes(told))
        except Exception as error:  # a journal that cannot be written, say: what comes next would not be in it
            self._fail(error)
        assert self._gave_up is not None
        if self._gave_up.done():
            return
        output = unpack(told, StepOutput)
        write_down(output, self._pending.get)
        for end in output.finished:
            if pending := self._pending.get(end.request_id):
                pending.finish(end)

    def _totals(self) -> EngineStats:
        return _summed(self._earlier, self._latest)


def _summed(before: EngineStats, now: EngineStats) -> EngineStats:
    return msgspec.structs.replace(now, **{name: getattr(before, name) + getattr(now, name) for name in TOTALS})


def _irreplaceable(who: str, error: Exception) -> WorkerDied:
    """What the new process could not do: load weights that do not fit any more, say."""
    died = WorkerDied(who, f"died and could not be replaced: {error or repr(error)}")
    died.__cause__ = error
    return died
