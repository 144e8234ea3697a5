"""The one place where concrete classes of the workers' half are named: it runs in their processes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.algo.config import AlgoConfig
from headrace.engine.config import EngineConfig
from headrace.models.lora import LoraConfig
from headrace.orchestration.workers.messages import EngineStart, TrainerStart
from headrace.protocols import EngineCore, TrainerCore, WeightReceiver, WeightSender
from headrace.trainer.config import TrainConfig
from headrace.weights import Manifest

if TYPE_CHECKING:
    from headrace.trainer.step.shadow import Shadow


def preload(kind: str) -> None:
    """Imports what the worker will need, while the controller is still busy with the other one."""
    importlib.import_module({"trainer": "headrace.trainer.step.trainer", "engine": "headrace.engine.native.core"}[kind])


def build_trainer_core(start: TrainerStart, weights_fd: int) -> tuple[TrainerCore, WeightSender, dict[str, Manifest]]:
    import torch

    from headrace.trainer.step.learner import Assignment
    from headrace.trainer.step.trainer import TorchTrainer
    from headrace.weight_sync.shared_memory import SharedMemorySender, lay_out

    train, algo = TrainConfig(**start.train), AlgoConfig(**start.algo)
    torch.set_num_threads(train.threads or torch.get_num_threads())
    adapters = {
        name: Assignment(TrainConfig(**one.train), AlgoConfig(**one.algo), LoraConfig(**one.lora))
        for name, one in start.adapters.items()
    }
    core = TorchTrainer(
        model_dir=Path(start.model_dir),
        config=train,
        algo=algo,
        seed=start.seed,
        keep_routing=start.keep_routing,
        adapters=adapters,
    )
    for name, checkpoint in start.restore.items():
        core.restore(Path(checkpoint), name)
    served = [spec.name for spec in core.adapters()]
    dtype = getattr(torch, start.serving_dtype)
    manifests = {"": lay_out(core.parameters(), dtype, slots=1 if served else 2)}
    for name in served:
        manifests[name] = lay_out(core.parameters(name), dtype, offset=max(one.end for one in manifests.values()))
    return core, SharedMemorySender(weights_fd, manifests), manifests


def build_shadow(
    start: TrainerStart, core: TrainerCore, manifests: Mapping[str, Manifest], weights_fd: int
) -> tuple[Shadow | None, Manifest | None]:
    """The student as a teacher, in memory behind what the trainer publishes."""
    if start.shadow is None:
        return None, None
    import torch

    from headrace.trainer.step.shadow import Shadow
    from headrace.weight_sync.shared_memory import SharedMemorySender, lay_out

    told, dtype = start.shadow, getattr(torch, start.shadow.dtype)
    behind = lay_out(core.parameters(), dtype, offset=max(manifest.end for manifest in manifests.values()))
    sender = SharedMemorySender(weights_fd, {"": behind})
    shadow = Shadow(
        kind=told.kind,
        every=told.every,
        decay=told.decay,
        dtype=dtype,
        sender=sender,
        version=core.version,
        parameters=core.parameters(),
    )
    if checkpoint := start.restore.get(""):
        shadow.restore(Path(checkpoint))
    return shadow, behind


def build_engine_core(start: EngineStart, weights_fd: int) -> tuple[EngineCore, WeightReceiver]:
    import torch

    from headrace.engine.native.core import NativeEngine
    from headrace.engine.native.runners.weights import parameters_from_dir
    from headrace.weight_sync.directory import DirectoryReceiver
    from headrace.weight_sync.shared_memory import SharedMemoryReceiver

    directory, config = Path(start.model_dir), EngineConfig(**start.engine)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    core = NativeEngine(directory, config)
    if start.manifests:
        return core, SharedMemoryReceiver(weights_fd, start.manifests)
    dtype = getattr(torch, config.serving_dtype)
    return core, DirectoryReceiver(directory, lambda path: parameters_from_dir(path, dtype))
