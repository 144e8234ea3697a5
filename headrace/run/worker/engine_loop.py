"""The loop of an engine's process: one forward pass after another. Messages are read between two passes. New weights are verified
while passes run, and are swapped in between two of them.

    socket ──reader thread──▶ inbox ──▶ the engine's own thread: messages, one swap, one forward pass, and again
                                ▲  │ load
                        swap ready │
                                │  ▼
                          weights thread: fingerprint, unpack, convert
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from headrace.core.protocols import EngineCore, WeightReceiver
from headrace.core.reports import LoadReport
from headrace.core.steps import StepOutput, are_alike, merged
from headrace.core.types import Request
from headrace.core.weights import WeightUpdate
from headrace.engine.streaming import check_parts, mixtures
from headrace.processes.wire import Frame, WorkerEnd, answer, begun, fail, unpack, vital
from headrace.run.worker.worker_messages import EngineStart

T = TypeVar("T")

STATS_EVERY = 1.0
"""Seconds between two reports of the engine's statistics, which it sends unasked."""


HOLD = 0.1
"""Seconds for which the output of a pass may be held, to be sent in one message with those behind it."""

HOLD_ROWS = 16
"""Fewest tokens of a pass that is held: an engine that serves a few requests is one that somebody may watch."""

HOLD_TOKENS = 1 << 13
"""Tokens that are held at most: about 100 kB."""


class Outputs:
    """Sends the outputs of passes, several in one message where an engine makes many large ones: the controller of 100 engines spends more on
    messages than on tokens otherwise. An output that ends a request is not held, nor one behind a pause of `HOLD`. Passes that share a message have
    the same requests, so that their tokens are columns of bytes (`merged`)."""

    def __init__(self, push: Callable[[str, Any], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._push, self._clock = push, clock
        self._held: list[StepOutput] = []
        self._tokens = 0
        self._sent = clock()

    def add(self, output: StepOutput, seconds: float) -> None:
        """`seconds`: those of its pass. The next one is expected to take as long."""
        if self._held and not are_alike(self._held[0], output):
            self.flush()
        self._held.append(output)
        self._tokens += len(output.tokens)
        urgent = len(output.tokens) < HOLD_ROWS or output.finished or output.scores
        if urgent or self._tokens >= HOLD_TOKENS or self._late(seconds):
            self.flush()

    def flush(self) -> None:
        """Sends what is held. Called before anything else is sent, so that the order stays that of the engine."""
        if self._held:
            self._push("output", merged(self._held))
            self._held, self._tokens, self._sent = [], 0, self._clock()

    def _late(self, seconds: float) -> bool:
        return self._clock() + seconds - self._sent > HOLD


def serve_engine(end: WorkerEnd, inbox: queue.Queue[Any]) -> None:
    """Runs the loop of an engine in this process, or that of a server beside it (`server_loop.py`)."""
    from headrace.run.worker.build import build_engine_core, preload
    from headrace.run.worker.server_loop import serve_server

    preload("engine")
    start = inbox.get()
    wanted = unpack(start.payload, EngineStart)
    if wanted.server:
        serve_server(end, inbox, start)
        return
    parts: dict[str, Any] = {}

    def begin() -> Any:
        core, receiver = build_engine_core(wanted)
        parts.update(core=core, receiver=receiver)
        return core.capabilities

    answer(end, start, begin)
    if not parts:
        return
    begun()
    loop = EngineLoop(end, inbox, parts["core"], parts["receiver"])
    while True:
        loop.round()


class EngineLoop:
    def __init__(self, end: WorkerEnd, inbox: queue.Queue[Any], core: EngineCore, receiver: WeightReceiver) -> None:
        self._end, self._inbox, self._core = end, inbox, core
        self._loader = Loader(end, inbox, core, receiver)
        self._outputs = Outputs(end.push)
        self._swaps: deque[Callable[[], None]] = deque()
        self._stats_due = 0.0
        self._drains: list[Frame] = []
        """Calls of `drain`, answered when no request is left."""

    def round(self) -> None:
        """Reads the messages that have arrived (waits for one when idle), does one swap, then one forward pass."""
        self._take(block=not self._core.has_work())
        while not self._inbox.empty():
            self._take(block=False)
        if self._swaps:
            self._outputs.flush()
            self._swaps.popleft()()
        if self._core.has_work():
            began = time.monotonic()
            output = self._core.step()
            self._loader.mixed_tokens += len(output.tokens) if output.mixed else 0
            self._outputs.add(output, time.monotonic() - began)
        if not self._core.has_work():
            self._outputs.flush()
        if self._drains and self._core.drained:
            self._outputs.flush()
            for frame in self._drains:
                self._end.reply(frame, None)
            self._drains.clear()
        if (now := time.monotonic()) >= self._stats_due:
            self._stats_due = now + STATS_EVERY
            self._outputs.flush()
            self._end.push("stats", self._core.stats())

    def _take(self, block: bool) -> None:
        block = block and not self._swaps
        try:
            item = self._inbox.get(block=block, timeout=STATS_EVERY if block else None)
        except queue.Empty:
            return
        if callable(item):  # new weights that the weights thread has prepared
            self._swaps.append(item)
        else:
            self._obey(item)

    def _obey(self, frame: Frame) -> None:
        self._outputs.flush()
        core = self._core
        match frame.method:
            case "add":
                self._add(unpack(frame.payload, Request))
            case "cancel":
                core.cancel(unpack(frame.payload, str))
            case "load" | "sleep" | "wake":
                self._loader.enter(frame)
            case "stats" | "pause" | "resume" | "abort":
                answer(self._end, frame, getattr(core, frame.method))
            case "unload":
                answer(self._end, frame, lambda: core.unload(unpack(frame.payload, str)))
            case "drain":
                core.drain()
                self._drains.append(frame)
            case method:
                raise AssertionError(f"unknown message {method}")

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
        except ValueError as error:
            self._end.push("refused", (request.id, str(error)))


class Loader:
    """The weights thread. It prepares one update after another."""

    def __init__(self, end: WorkerEnd, inbox: queue.Queue[Any], core: EngineCore, receiver: WeightReceiver) -> None:
        self._end, self._inbox, self._core, self._receiver = end, inbox, core, receiver
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._served: tuple[WeightUpdate, Mapping[str, Any]] | None = None
        """The base weights that are served. Their tensors stay valid until the version after the next one is published."""
        self.mixed_tokens = 0
        """Total number of tokens that were sampled while an update was streamed in."""
        threading.Thread(target=vital, args=(self._run,), daemon=True).start()

    def enter(self, frame: Frame) -> None:
        """Queues an update, or a change between sleep and wake, which waits for the updates before it."""
        self._frames.put(frame)

    def _run(self) -> None:
        while True:
            frame = self._frames.get()
            try:
                self._load(frame) if frame.method == "load" else self._turn(frame)
            except Exception as error:
                fail(self._end, frame, error)

    def _turn(self, frame: Frame) -> None:
        """Falls asleep, or wakes, between two passes."""
        core, asleep = self._core, frame.method == "sleep"
        change = (lambda: core.sleep(unpack(frame.payload, bool))) if asleep else core.wake
        self._between_passes(lambda: self._end.reply(frame, change()))

    def _load(self, frame: Frame) -> None:
        started, gaps, mixed_before = time.perf_counter(), 0.0, self.mixed_tokens
        received_before = self._receiver.received
        update, parts = unpack(frame.payload, tuple[WeightUpdate, int])
        check_parts(update, parts)
        tensors = self._receiver.receive(update)
        received = self._receiver.received - received_before
        waited = 0.0
        try:
            for stage in mixtures(self._served[1], tensors, parts) if self._served and parts > 1 else ():
                gap, wait = self._swap(self._core.prepare(update, stage, mixed=True))
                gaps, waited = gaps + gap, waited + wait
            prepared = self._core.prepare(update, tensors)
            verified = time.perf_counter() - started - waited

            def report(gap: float) -> None:
                mixed = self.mixed_tokens - mixed_before
                self._end.reply(frame, LoadReport(update.version, verified, gaps + gap, mixed, received))

            self._swap(prepared, report)
        except Exception:
            if waited:
                self._take_back()
            raise
        if update.adapter is None:
            self._served = update, tensors

    def _swap(self, prepared: Any, then: Callable[[float], None] | None = None) -> tuple[float, float]:
        """Swaps in the engine's thread, between two passes. Returns the seconds that the engine paused, and that this thread waited.

        `then` is called directly after the swap, before any output of the new weights is sent."""

        replaced: list[Any] = []

        def swap() -> float:
            before = time.perf_counter()
            replaced.append(self._core.swap(prepared))
            gap = time.perf_counter() - before
            if then:
                then(gap)
            return gap

        began = time.perf_counter()
        gap, waited = self._between_passes(swap), time.perf_counter() - began
        replaced.clear()  # here, beside the next pass: to give the memory of a model back takes a millisecond and more
        return gap, waited

    def _between_passes(self, work: Callable[[], T]) -> T:
        """Does work in the engine's thread, between two passes. Returns its result, or raises its exception."""
        done: Future[T] = Future()

        def act() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(act)
        return done.result()

    def _take_back(self) -> None:
        """Restores the previous weights after a streamed update failed halfway. If that fails too, the process ends."""
        assert self._served is not None
        try:
            self._swap(self._core.prepare(*self._served))
        except Exception as error:
            failed = error  # Python deletes `error` at the end of this block

            def leave() -> NoReturn:
                raise failed

            self._inbox.put(leave)
