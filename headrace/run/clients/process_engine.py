"""An engine in a worker process, behind the protocol `Engine`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from headrace.core.errors import IdentityError, PoisonedRequest
from headrace.core.protocols import Job, Launcher, Worker
from headrace.core.reports import TOTALS, Capabilities, EngineStats, LoadReport, SleepReport
from headrace.core.steps import Finished, SoFar, StepOutput
from headrace.core.types import Completion, Request
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.request_book import Pending, RequestBook, scoring
from headrace.engine.streaming import check_parts
from headrace.facts.facts import EngineSample, WorkerLost
from headrace.facts.telemetry import Telemetry
from headrace.loop.own_groups import Suspects, said_of, ticket_of
from headrace.processes.wire import unpack
from headrace.run.clients.keeper import Keeper
from headrace.run.worker.worker_messages import EngineStart


class ProcessEngine:
    """Protocol `Engine`. A dead process is replaced at once: current weights first, then every request from its prefix."""

    def __init__(
        self,
        launcher: Launcher,
        job: Job,
        max_deaths: int,
        telemetry: Telemetry,
        suspects: Suspects | None = None,
    ) -> None:
        """`suspects`: those of the fleet; None: the engine's own, with the usual number of deaths."""
        self._who, self._telemetry = job.who, telemetry
        self._suspects = suspects or Suspects(EngineConfig.ticket_deaths)
        self._suspects.listen(self._send_held_back)
        self._sent: dict[str, str] = {}
        """The requests that the process has, by id, with their names among the suspects."""
        self._held_back: dict[str, Request] = {}
        """Requests of suspects, which wait for their turn, by id."""
        self._names = itertools.count()
        self._book = RequestBook()
        self._keeper = Keeper(launcher, job, max_deaths, self, self._heard)
        self._wanted: dict[str, WeightUpdate] = {}
        """The newest weights of each adapter; those of the base model have the empty name."""
        self._live: dict[str, LoadReport] = {}
        self._loading = asyncio.Lock()
        """Two may want one version to be loaded at once: who publishes it, and the wake of an engine that slept meanwhile."""
        self._held: Literal["", "drain", "pause"] = ""
        self._awake, self._owes_requests = asyncio.Event(), False
        """Whether it has its devices; and whether a process that began asleep has not been given the requests yet."""
        self._scorings = itertools.count()
        self._earlier = EngineStats()
        """The totals of processes that died: what is reported never decreases."""
        self._latest = EngineStats()
        self.capabilities = Capabilities(context_length=0)

    async def launch(self) -> None:
        """Starts the process. It imports its libraries while the caller does other work."""
        await self._keeper.launch()

    async def open(self, start: EngineStart) -> None:
        self._start = start
        if not start.asleep:
            self._awake.set()
        await self._keeper.open()

    async def generate(self, request: Request) -> Completion:
        """Raises what the protocol says, and PoisonedRequest for one whose ticket was given up."""
        return (await self._ended(request)).so_far()

    async def until_end(self, request: Request) -> Finished:
        return (await self._ended(request)).done.result()

    async def _ended(self, request: Request) -> Pending:
        await self._keeper.until_up()
        if (ticket := ticket_of(request.id)) in self._suspects.given_up:
            raise self._poisoned(ticket)
        pending = self._book.enter(request)
        finished = False
        try:
            if not self._owes_requests:
                self._send(request)
            finished = (await pending.done).stop != "error"
            return pending
        except asyncio.CancelledError:
            self._keeper.push("cancel", request.id)
            raise
        finally:
            self._book.leave(request.id)
            self._held_back.pop(request.id, None)
            if name := self._sent.pop(request.id, ""):
                self._suspects.ended(name, finished)

    def _send(self, request: Request) -> None:
        name = f"{request.id} {next(self._names)}"
        if self._suspects.may_begin(ticket_of(request.id), name):
            self._sent[request.id] = name
            self._keeper.push("add", request)
        else:
            self._held_back[request.id] = request

    def _send_held_back(self) -> None:
        if self._keeper.is_up and not self._owes_requests:  # else `_reissue` sends them
            held_back, self._held_back = self._held_back, {}
            for request in held_back.values():
                self._send(request)

    def _poisoned(self, ticket: str) -> PoisonedRequest:
        return PoisonedRequest(said_of([ticket], self._suspects.most, "engine processes"))

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        check_parts(update, parts)
        await self._awake.wait()
        name = update.adapter.name if update.adapter else ""
        before = self._wanted.get(name)
        self._wanted[name] = update
        try:
            return await self._keeper.retrying(lambda worker: self._load(worker, name, update, parts))
        except Exception:
            if before is None:  # refused: a new process must not be given this update either
                del self._wanted[name]
            else:
                self._wanted[name] = before
            raise

    async def unload(self, adapter: str) -> None:
        """Raises ValueError where it is not loaded, or requests use it."""
        await self._keeper.ask("unload", adapter, type(None))
        self._wanted.pop(adapter, None)
        self._live.pop(adapter, None)

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        return await self.generate(scoring(f"score/{next(self._scorings)}", tokens, priority=-1, adapter=adapter))

    async def drain(self) -> None:
        self._held = "drain"
        await self._keeper.ask("drain", None, type(None))

    async def pause(self) -> None:
        """No forward pass until `resume`; requests keep all that they have, and updates are loaded."""
        self._held = "pause"
        await self._keeper.ask("pause", None, type(None))

    async def resume(self) -> None:
        self._held = ""
        await self._keeper.ask("resume", None, type(None))

    async def sleep(self, keep: bool) -> SleepReport:
        self._awake.clear()
        self._live.pop("", None)  # adapters stay loaded
        return await self._keeper.ask("sleep", keep, SleepReport)

    async def wake(self, replaced: bool) -> SleepReport:
        self._awake.set()
        report = await self._keeper.ask("wake", None, SleepReport)
        for name in [] if replaced and len(self._wanted) == 1 else list(self._wanted):  # adapters need their base
            await self._keeper.retrying(lambda worker, name=name: self._load_newest(worker, name))  # type: ignore[misc]
        if self._owes_requests:
            self._reissue()
        return report

    async def abort(self) -> None:
        self._book.abort()
        self._book.interrupt(self._held_back)
        self._held_back = {}
        if self._keeper.is_up:
            await self._keeper.ask_once("abort")  # if the process dies meanwhile, `reissued` ends them
        else:
            self._book.interrupt_aborted()

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        return self._book.unfinished(among)

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        self._book.listen(listener)

    async def stats(self) -> EngineStats:
        self._latest = await self._keeper.ask("stats", None, EngineStats)
        return self._totals()

    async def absence(self) -> str:
        return await self._keeper.absence()

    async def watch(self) -> None:
        await self._keeper.watch()

    def kill(self) -> None:
        self._keeper.kill()

    async def close(self) -> None:
        await self._keeper.close()

    # -- for the keeper (protocol `WorkerOwner`) -----------------------------------------------------------------------------------

    async def begin(self, worker: Worker) -> None:
        self.capabilities = await worker.call("start", self._start, Capabilities)

    async def resume_in(self, worker: Worker) -> None:
        self._live = {}
        if self._start.asleep:
            if not self._awake.is_set():  # `wake` does the rest: until then there is no memory for weights
                self._owes_requests = True
                return
            await worker.call("wake", None, SleepReport)
        for name in list(self._wanted):  # the base model's was loaded first, and a dict keeps that order
            await self._load_newest(worker, name)
        self._reissue()

    def went_down(self, forgive: Callable[[], None] | None) -> None:
        there = [name for name in self._sent if not self._book.is_done(name)]
        given_up = self._suspects.charge(map(ticket_of, there), forgive) if forgive else []
        sent, self._sent = self._sent, {}
        self._held_back = {}
        for name in sent.values():
            self._suspects.ended(name)
        if given_up:
            self._telemetry.warn(said_of(given_up, self._suspects.most, "engine processes"))
            for request_id in self._book.ids:
                if (ticket := ticket_of(request_id)) in given_up:
                    self._book.fail(request_id, self._poisoned(ticket))

    def died(self, how: str, deaths: int) -> None:
        self._earlier, self._latest = self._totals(), EngineStats()
        self._telemetry.record(WorkerLost(self._telemetry.clock(), self._who, how, deaths, len(self._book)))

    def given_up(self, error: Exception) -> None:
        self._book.give_up(error)

    def _reissue(self) -> None:
        self._owes_requests = False
        if self._held:  # first, or a pass in between would admit what has not begun
            self._keeper.push(self._held, None)
        for request in self._book.reissued():
            self._send(request)

    # -- inside ---------------------------------------------------------------------------------------------------------

    async def _load_newest(self, worker: Worker, name: str) -> None:
        """An update may be published over while a new process loads it, if nobody waits for that process (as in a fleet)."""
        while True:
            async with self._loading:
                update = self._wanted[name]
                try:
                    await self._load_once(worker, name, update)
                    return
                except IdentityError:
                    if self._wanted.get(name) is update:
                        raise

    async def _load(self, worker: Worker, name: str, update: WeightUpdate, parts: int) -> LoadReport:
        async with self._loading:
            return await self._load_once(worker, name, update, parts)

    async def _load_once(self, worker: Worker, name: str, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """Loads nothing where the process has this version already: a new process is given the newest updates at its start."""
        if name not in self._live or self._live[name].version != update.version:
            self._live[name] = await worker.call("load", (update, parts), LoadReport)
        return self._live[name]

    def _heard(self, method: str, payload: msgspec.Raw) -> None:
        if method == "output":
            self._on_output(unpack(payload, StepOutput))
        elif method == "stats":
            self._latest = unpack(payload, EngineStats)
            self._telemetry.record(EngineSample(self._telemetry.clock(), self._totals()))
        elif method == "refused":
            self._book.refuse(*unpack(payload, tuple[str, str]))

    def _on_output(self, output: StepOutput) -> None:
        try:
            self._book.publish(output)
        except Exception as error:  # such as a log that cannot be written: it would lack all later tokens
            self._keeper.give_up(error)
        if not self._keeper.is_lost:
            self._book.enter_output(output)

    def _totals(self) -> EngineStats:
        before, now = self._earlier, self._latest
        return msgspec.structs.replace(now, **{name: getattr(before, name) + getattr(now, name) for name in TOTALS})


# --- An engine process on devices that the trainer lends while it waits (`engine/fleet/fleet.py`).


class LentProcess(ProcessEngine):
    """An engine process that begins asleep, also after a death, and has no weights when it wakes: whoever wakes it loads all of them, because those that it was asked to
    load last may be gone by then."""

    _death = ""
    """How its last process ended; empty once another has said that it is awake."""

    async def wake(self, replaced: bool) -> SleepReport:
        report = await self._keeper.ask("wake", None, SleepReport)
        if self._keeper.is_up:  # else it has died since, and its successor is asleep
            self._awake.set()
            self._death = ""
            if self._owes_requests:
                self._reissue()
        return report

    async def absence(self) -> str:
        """Returns at once, too, if its process has died since it woke: the successor answers, but sleeps, and would begin nothing."""
        return self._death or await self.ended()

    async def ended(self) -> str:
        return await super().absence()

    def died(self, how: str, deaths: int) -> None:
        self._death = how
        super().died(how, deaths)

    def went_down(self, forgive: Callable[[], None] | None) -> None:
        self._awake.clear()
        super().went_down(forgive)

    async def _load(self, worker: Worker, name: str, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """Waits for a process that is awake: the one that was there may have died since this was asked, and another be asleep in its place."""
        await self._awake.wait()
        return await super()._load(worker, name, update, parts)
