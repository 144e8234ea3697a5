"""The program of a worker process: `python -m headrace.run.worker.worker KIND (--socket FD | --connect HOST:PORT)`, or
`--join HOST:PORT` for a worker that nobody waits for yet.

It reads frames in one thread and works in another, and it ends as soon as the controller's end of the socket is closed. So a killed
controller leaves no orphan, not even a stopped one (`family.py`).
"""

from __future__ import annotations

import functools
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from headrace.core.errors import CheckpointError, ConfigError, IdentityError
from headrace.core.printing import echo_traceback, guard_streams, say
from headrace.core.protocols import TrainerCore, WeightSender
from headrace.core.reports import Captured, TrainReport
from headrace.core.weights import WeightUpdate
from headrace.processes.health.family import PARENT, leave_sigterm_to_controller, signal_me_when_orphaned
from headrace.processes.health.stacks import answer_signals
from headrace.processes.joining.dial import dial, leave_when_asked, left_alone, offer, released, witnessed
from headrace.processes.joining.greeting import LEAVE, SEAT, TOKEN
from headrace.processes.joining.same_model import agree_to
from headrace.processes.launch.local import CORES
from headrace.processes.placed.examined import answer as answer_doctor
from headrace.processes.wire import Frame, WorkerEnd, answer, begun, fail, unpack
from headrace.run.hosts.user_host import serve_user_code
from headrace.run.worker.engine_loop import serve_engine
from headrace.run.worker.step_messages import ROWS, ReceivedRows
from headrace.run.worker.worker_messages import SharedStart, TrainerReady, TrainerStart
from headrace.trainer.shared.calls import AdamStep, Checkpoint, Publish, SharedLora, TrainingPass
from headrace.weight_sync.files import UpdateRecord, write_version

if TYPE_CHECKING:
    from headrace.trainer.dealing.share import StepShare
    from headrace.trainer.shared.shared_trainer import SharedTrainer
    from headrace.trainer.step.reference import Shadow


# --- The worker whose trainer several clients share
# It answers one call after another, and each call names its client's adapter.


def serve_clients(end: WorkerEnd, inbox: queue.Queue[Frame]) -> None:
    from headrace.run.worker.build import build_shared_trainer, preload

    preload("shared trainer")
    start = inbox.get()
    parts: dict[str, SharedTrainer] = {}

    def begin() -> str:
        parts["core"] = build_shared_trainer(unpack(start.payload, SharedStart))
        return parts["core"].dtype

    answer(end, start, begin)
    begun()
    while parts:
        frame = inbox.get()
        answer(end, frame, lambda frame=frame: _call(parts["core"], frame))  # type: ignore[misc]


def _call(core: SharedTrainer, frame: Frame) -> Any:
    match frame.method:
        case "add":
            return core.add(*unpack(frame.payload, tuple[str, SharedLora]))
        case "remove":
            return core.remove(unpack(frame.payload, str))
        case "run":
            return core.run(unpack(frame.payload, TrainingPass))
        case "spoil":
            return core.spoil(*unpack(frame.payload, tuple[str, str]))
        case "optim_step":
            return core.optim_step(unpack(frame.payload, AdamStep))
        case "save":
            return core.save(unpack(frame.payload, Checkpoint))
        case "restore":
            return core.restore(unpack(frame.payload, Checkpoint))
        case "publish":
            return publish(core, unpack(frame.payload, Publish))
        case method:
            raise AssertionError(f"unknown call {method}")


def publish(core: SharedTrainer, wanted: Publish) -> WeightUpdate:
    """Writes an adapter where the engine can load it, and returns the update with the fingerprint that the engine has to find."""
    import torch

    from headrace.weight_sync.packed import PackedBuffer, lay_out

    started = time.perf_counter()
    parameters = list(core.parameters(wanted.model))
    manifest = lay_out(parameters, getattr(torch, wanted.dtype))
    buffer = memoryview(bytearray(manifest.nbytes))
    packed = PackedBuffer(manifest, buffer)
    packed.fill(parameters)
    update = WeightUpdate(
        version=core.version(wanted.model),
        kind="adapter",
        fingerprint=packed.fingerprint(),
        nbytes=manifest.payload,
        seconds=time.perf_counter() - started,
        where={"path": wanted.directory},
        adapter=core.spec(wanted.model, wanted.served_as, wanted.base),
    )
    write_version(Path(wanted.directory), UpdateRecord(update, manifest), buffer)
    return update


# --- worker ------------------------------------------------------------


def main() -> None:
    guard_streams()
    gc.disable()  # until `begun`
    kind, how, where = sys.argv[1:4]
    joined = how == "--join"
    seated = witnessed(where) if joined else lambda session: None  # before there are threads
    if PARENT in os.environ:  # unset in a worker that was started by hand
        signal_me_when_orphaned(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which ends its workers
    if not joined:
        leave_sigterm_to_controller()
    answer_signals()
    if cores := [int(core) for core in os.environ.get(CORES, "").split(",") if core]:
        os.sched_setaffinity(0, cores)
    if joined:
        end = offer(where, kind, seated, agree=agree_to, examine=answer_doctor)  # type: ignore[arg-type]
        leave_when_asked(end)
    else:
        end = _reach_controller(kind, how, where)
    leave = left_alone if joined else functools.partial(os._exit, 0)
    inbox: queue.Queue[Frame] = queue.Queue()
    threading.Thread(target=_read, args=(end, inbox, leave), daemon=True).start()
    try:
        _SERVES[kind](end, inbox)
    except (ConnectionError, TimeoutError):
        leave()


def _reach_controller(kind: str, how: str, where: str) -> WorkerEnd:
    if how == "--socket":
        return WorkerEnd(socket.socket(fileno=int(where)))
    try:
        return dial(where, kind, os.environ.pop(TOKEN, ""), os.environ.pop(SEAT, ""))  # type: ignore[arg-type]
    except (OSError, ConfigError) as error:
        say(error)
        sys.exit(1)


def _read(end: WorkerEnd, inbox: queue.Queue[Frame], leave: Callable[[], object]) -> None:
    """Reads frames into the inbox. When this thread ends, the process ends: without messages it would wait for ever."""
    try:
        while (frame := end.receive()) is not None:
            if frame.method == LEAVE:
                _act_last(end)
                released()
            inbox.put(frame)
            if frame.method == ROWS:  # here, so that the next one travels while this one waits for a busy trainer
                end.reply(frame, None)
    except BaseException:
        echo_traceback()
    _act_last(end)
    leave()


def _act_last(end: WorkerEnd) -> None:
    for act in end.last_acts:
        try:
            act()
        except Exception:
            echo_traceback()


# -- the trainer ------------------------------------------------------------------------------------------------------------


def serve_trainer(end: WorkerEnd, inbox: queue.Queue[Frame]) -> None:
    """Answers one call after another."""
    from headrace.run.worker.build import build_shadow, build_trainer_core, preload

    preload("trainer")
    start = inbox.get()
    parts: dict[str, Any] = {}
    rows = ReceivedRows()
    saver: Saver

    def begin() -> TrainerReady:
        nonlocal saver
        wanted = unpack(start.payload, TrainerStart)
        core, sender, manifests = build_trainer_core(wanted, end.door)
        shadow, layout = build_shadow(wanted, core)
        saver = Saver(core, shadow)
        parts.update(core=core, publisher=Publisher(core, sender), shadow=shadow, start=wanted)
        return TrainerReady(manifests, core.version, core.dtype, layout, core.arithmetic, packed=core.packed)

    answer(end, start, begin)
    begun()
    while parts:
        frame = inbox.get()
        if frame.method == ROWS:
            rows.take(frame.payload)
        elif frame.method == "publish":
            parts["publisher"].publish(end, frame)
        elif frame.method == "capture":
            answer(end, frame, lambda frame=frame: saver.capture(unpack(frame.payload, str)))  # type: ignore[misc]
        elif frame.method == "save":
            saver.save(end, frame)
        else:
            answer(end, frame, lambda frame=frame: _trainer_call(frame=frame, rows=rows, **parts))  # type: ignore[misc]


class Publisher:
    """Publishes weights. A published adapter names the base weights published before it, so that an engine never serves it on others."""

    def __init__(self, core: TrainerCore, sender: WeightSender) -> None:
        self._core, self._sender = core, sender
        self._specs, self._base = {spec.name: spec for spec in core.adapters()}, ""
        self._copied: dict[str, Callable[[], WeightUpdate]] = {}
        """The rest of each publish, by adapter."""

    def copy(self, adapter: str) -> None:
        core, parameters = self._core, self._core.parameters(adapter)
        if not adapter:
            self._copied[adapter] = self._sender.copy(core.version, parameters)
            return
        assert self._base, "the base weights are published before any adapter"
        spec = msgspec.structs.replace(self._specs[adapter], base=self._base)
        self._copied[adapter] = self._sender.copy(core.version_of(adapter), parameters, spec)

    def publish(self, end: WorkerEnd, frame: Frame) -> None:
        """Answers a call of `publish` in another thread: the trainer goes on with its next call."""
        adapter = unpack(frame.payload, str)
        try:
            if adapter not in self._copied:
                self.copy(adapter)
        except Exception as error:
            fail(end, frame, error)
            return
        finish = self._copied.pop(adapter)

        def work() -> WeightUpdate:
            update = finish()
            if not adapter:
                self._base = update.fingerprint
            return update

        threading.Thread(target=answer, args=(end, frame, work), daemon=True).start()


class Saver:
    """Writes checkpoints. What was captured is written in another thread: the trainer goes on with its next call."""

    def __init__(self, core: TrainerCore, shadow: Shadow | None) -> None:
        self._core, self._shadow = core, shadow
        self._captured: dict[str, tuple[Captured, Callable[[Path], None]]] = {}
        """The rest of each checkpoint, by adapter."""
        self._writing: dict[str, Path] = {}

    def capture(self, adapter: str) -> Captured:
        """Raises CheckpointError if the one before is still being written: its copy would be overwritten."""
        if before := self._writing.get(adapter):
            raise CheckpointError(f"two checkpoints at once: {before.name} is still being written, wait for it")
        parts = [self._core.capture(adapter), *([self._shadow.capture()] if self._shadow else [])]
        report = Captured(
            sum(report.nbytes for report, _ in parts), next((report.short for report, _ in parts if report.short), "")
        )

        def write(directory: Path) -> None:
            for _, rest in parts:
                rest(directory)

        self._captured[adapter] = report, write
        return report

    def save(self, end: WorkerEnd, frame: Frame) -> None:
        where, adapter = unpack(frame.payload, tuple[str, str])
        directory = Path(where)
        report, write = self._captured.pop(adapter, (None, self._now(adapter)))
        if report is None or report.short:
            answer(end, frame, lambda: write(directory))
            return
        self._writing[adapter] = directory

        def work() -> None:
            try:
                write(directory)
            finally:
                del self._writing[adapter]

        threading.Thread(target=answer, args=(end, frame, work), daemon=True).start()

    def _now(self, adapter: str) -> Callable[[Path], None]:
        """Writes what is there, without a copy."""

        def write(directory: Path) -> None:
            self._core.save(directory, adapter)
            if self._shadow:
                self._shadow.save(directory)

        return write


def _step(core: TrainerCore, share: StepShare, start: TrainerStart) -> TrainReport:
    try:
        return core.step(share)
    except IdentityError as error:
        from headrace.run.worker.first_difference import explained

        raise explained(error, core, start, share.head.adapter) from error


def _trainer_call(
    core: TrainerCore,
    publisher: Publisher,
    shadow: Shadow | None,
    start: TrainerStart,
    *,
    rows: ReceivedRows,
    frame: Frame,
) -> Any:
    match frame.method:
        case "step":
            report = _step(core, rows.share(frame.payload), start)
            if shadow and not report.skipped:
                shadow.follow(report.version, core.parameters())
            return report
        case "publish_shadow":
            assert shadow, "no teacher is the student itself"
            return shadow.publish()
        case "copy":
            return publisher.copy(unpack(frame.payload, str))
        case "score":
            return core.score(*unpack(frame.payload, tuple[list[int], str]))
        case "export":
            where, dtype, adapter = unpack(frame.payload, tuple[str, Literal["bfloat16", "float32"], str])
            return core.export(Path(where), dtype, adapter, merge=True)
        case "begin_trial":
            return core.begin_trial(unpack(frame.payload, str))
        case "end_trial":
            return core.end_trial(*unpack(frame.payload, tuple[list[list[int]], str, int]))
        case "sleep" | "wake" | "reserve":
            return getattr(core, frame.method)()
        case method:
            raise AssertionError(f"unknown call {method}")


_SERVES: dict[str, Callable[[WorkerEnd, queue.Queue[Frame]], None]] = {
    "engine": serve_engine,
    "trainer": serve_trainer,
    "shared trainer": serve_clients,
    "scorer": serve_user_code,
    "environment": serve_user_code,
}


if __name__ == "__main__":
    main()
