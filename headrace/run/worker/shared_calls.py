"""The worker whose trainer several clients share: it answers one call after another, and each call names its client's adapter."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.weights import WeightUpdate
from headrace.processes.wire import Frame, WorkerEnd, answer, begun, unpack
from headrace.run.worker.worker_messages import SharedStart
from headrace.trainer.shared.calls import AdamStep, Checkpoint, Publish, SharedLora, TrainingPass
from headrace.weight_sync.files import UpdateRecord, write_version

if TYPE_CHECKING:
    from headrace.trainer.shared.shared_trainer import SharedTrainer


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
