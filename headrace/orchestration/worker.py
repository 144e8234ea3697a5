"""What a worker process runs: `python -m headrace.orchestration.worker (engine|trainer) SOCKET_FD WEIGHTS_FD`.

Reads frames in one thread, works in another, and leaves as soon as the controller's end of the socket is closed: a killed
controller leaves no orphan behind.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import HeadraceError
from headrace.orchestration.messages import EngineStart, TrainerReady, TrainerStart
from headrace.orchestration.wire import Frame, WorkerEnd, name_of, unpack
from headrace.protocols import EngineCore, TrainerCore, WeightReceiver, WeightSender
from headrace.reports import LoadReport
from headrace.types import Batch, Request
from headrace.weights import WeightUpdate

if TYPE_CHECKING:
    from headrace.trainer.torch_shadow import Shadow

STATS_EVERY = 1.0
"""Seconds between two unasked reports of an engine's statistics."""


def main() -> None:
    kind, socket_fd, weights_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to leave
    if cores := [int(core) for core in os.environ.get("HEADRACE_CORES", "").split(",") if core]:
        os.sched_setaffinity(0, cores)
    end = WorkerEnd(socket.socket(fileno=socket_fd))
    inbox: queue.Queue[Frame] = queue.Queue()
    threading.Thread(target=_read, args=(end, inbox), daemon=True).start()
    try:
        {"engine": serve_engine, "trainer": serve_trainer}[kind](end, inbox, weights_fd)
    except BrokenPipeError:
        os._exit(0)  # the controller is gone


def _read(end: WorkerEnd, inbox: queue.Queue[Frame]) -> None:
    """Whatever ends this thread ends the process: a worker that hears nothing would wait for ever."""
    try:
        while (frame := end.receive()) is not None:
            inbox.put(frame)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _answer(end: WorkerEnd, frame: Frame, work: Callable[[], Any]) -> None:
    """Replies with the result, or with the exception by name; the user's errors without a traceback."""
    try:
        result = work()
    except Exception as error:
        _fail(end, frame, error)
    else:
        end.reply(frame, result)


def _fail(end: WorkerEnd, frame: Frame, error: Exception) -> None:
    known = isinstance(error, (HeadraceError, ValueError, OSError))
    end.fail(frame, name_of(error), str(error) if known else "".join(traceback.format_exception(error)))


# -- the trainer ------------------------------------------------------------------------------------------------------------


def serve_trainer(end: WorkerEnd, inbox: queue.Queue[Frame], weights_fd: int) -> None:
    """One call after the other."""
    from headrace.orchestration.build import build_shadow, build_trainer_core, preload

    preload("trainer")
    start = inbox.get()
    parts: dict[str, Any] = {}

    def begin() -> TrainerReady:
        told = unpack(start.payload, TrainerStart)
        core, sender, manifests = build_trainer_core(told, weights_fd)
        shadow, behind = build_shadow(told, core, manifests, weights_fd)
        parts.update(core=core, publisher=Publisher(core, sender), shadow=shadow)
        return TrainerReady(manifests, core.version, behind)

    _answer(end, start, begin)
    while parts:
        frame = inbox.get()
        _answer(end, frame, lambda frame=frame: _trainer_call(frame=frame, **parts))  # type: ignore[misc]


class Publisher:
    """An adapter that is published names the base that was published before it, so that it is never served over another."""

    def __init__(self, core: TrainerCore, sender: WeightSender) -> None:
        self._core, self._sender = core, sender
        self._specs, self._base = {spec.name: spec for spec in core.adapters()}, ""

    def publish(self, adapter: str) -> WeightUpdate:
        core, parameters = self._core, self._core.parameters(adapter)
        if not adapter:
            update = self._sender.send(core.version, parameters)
            self._base = update.fingerprint
            return update
        assert self._base, "the base weights are published before any adapter"
        spec = msgspec.structs.replace(self._specs[adapter], base=self._base)
        return self._sender.send(core.version_of(adapter), parameters, spec)


def _trainer_call(core: TrainerCore, publisher: Publisher, shadow: Shadow | None, frame: Frame) -> Any:
    match frame.method:
        case "step":
            report = core.step(unpack(frame.payload, Batch))
            if shadow and not report.skipped:
                shadow.follow(report.version, core.parameters())
            return report
        case "publish_shadow":
            assert shadow, "no teacher is the student itself"
            return shadow.publish()
        case "publish":
            return publisher.publish(unpack(frame.payload, str))
        case "score":
            return core.score(*unpack(frame.payload, tuple[list[int], str]))
        case "save":
            where, adapter = unpack(frame.payload, tuple[str, str])
            directory = Path(where)
            core.save(directory, adapter)
            return shadow.save(directory) if shadow else None
        case method:
            raise AssertionError(f"unknown call {method}")


# -- the engine -------------------------------------------------------------------------------------------------------------


def serve_engine(end: WorkerEnd, inbox: queue.Queue[Frame], weights_fd: int) -> None:
    """Forward passes for ever; messages are taken between them; new weights are verified beside them."""
    from headrace.orchestration.build import build_engine_core, preload

    preload("engine")
    start = inbox.get()
    parts: dict[str, Any] = {}

    def begin() -> Any:
        core, receiver = build_engine_core(unpack(start.payload, EngineStart), weights_fd)
        parts.update(core=core, receiver=receiver)
        return core.capabilities

    _answer(end, start, begin)
    if not parts:
        return
    loop = EngineLoop(end, inbox, parts["core"], parts["receiver"])
    while True:
        loop.turn()


class EngineLoop:
    def __init__(self, end: WorkerEnd, inbox: queue.Queue[Any], core: EngineCore, receiver: WeightReceiver) -> None:
        self._end, self._inbox, self._core, self._receiver = end, inbox, core, receiver
        self._stats_due = 0.0
        self._drains: list[Frame] = []
        """Callers that wait for the engine to run dry."""

    def turn(self) -> None:
        """Take what has arrived (wait for something when idle), then one forward pass."""
        self._take(block=not self._core.has_work())
        while not self._inbox.empty():
            self._take(block=False)
        if self._core.has_work():
            self._end.push("output", self._core.step())
        if self._drains and self._core.drained:
            for frame in self._drains:
                self._end.reply(frame, None)
            self._drains.clear()
        if (now := time.monotonic()) >= self._stats_due:
            self._stats_due = now + STATS_EVERY
            self._end.push("stats", self._core.stats())

    def _take(self, block: bool) -> None:
        try:
            item = self._inbox.get(block=block, timeout=STATS_EVERY if block else None)
        except queue.Empty:
            return
        if callable(item):  # new weights, prepared by the side thread
            item()
        else:
            self._obey(item)

    def _obey(self, frame: Frame) -> None:
        core = self._core
        match frame.method:
            case "add":
                self._add(unpack(frame.payload, Request))
            case "cancel":
                core.cancel(unpack(frame.payload, str))
            case "load":
                update = unpack(frame.payload, WeightUpdate)
                threading.Thread(target=self._prepare, args=(frame, update), daemon=True).start()
            case "unload":
                _answer(self._end, frame, lambda: core.unload(unpack(frame.payload, str)))
            case "stats" | "pause" | "resume" | "abort":
                _answer(self._end, frame, getattr(core, frame.method))
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

    def _prepare(self, frame: Frame, update: WeightUpdate) -> None:
        """Side thread: fingerprint and unpack while the engine goes on; the swap itself happens between two passes."""
        started = time.perf_counter()
        try:
            prepared = self._core.prepare(update, self._receiver.receive(update))
        except Exception as error:
            _fail(self._end, frame, error)
            return
        verified = time.perf_counter() - started

        def swap() -> LoadReport:
            before = time.perf_counter()
            self._core.swap(prepared)
            return LoadReport(update.version, verified, time.perf_counter() - before)

        self._inbox.put(lambda: _answer(self._end, frame, swap))


if __name__ == "__main__":
    main()
