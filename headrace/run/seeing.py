"""A run whose model sees: which settings that excludes, and the directory that its engine and its trainer load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.scoring.services.config import JudgeConfig
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.rows import images_in
from headrace.models.images import ALWAYS_APART, SERVED, type_of, with_images
from headrace.models.resolve import resolve_model
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.settings.extras import install, is_installed
from headrace.trainer.config import TrainConfig

_OTHER = (
    "lora.rank trains",
    "warm_start.path trains",
    "demonstrations.path trains",
    "[[teachers]] score",
    "algo.kl.place = reward scores",
)


def images_problems(
    task: TaskConfig,
    engine: EngineConfig,
    train: TrainConfig,
    place: OrchestrationConfig,
    environment: EnvironmentConfig,
    *,
    judges: Sequence[JudgeConfig],
    other: Sequence[object],
) -> Iterator[str]:
    """Yields a sentence for each setting that images exclude. `other`: whether each of `_OTHER` is set."""
    if not task.images:
        return
    asks = f"task.images = {_listed(task.images)}"
    if not is_installed("PIL"):
        yield f"{asks} needs the package Pillow: {install('vision')}"
    if engine.is_server:
        yield (
            f'{asks} shows images to headrace\'s own engine, and engine.kind = "{engine.kind}" is a server, which is sent tokens alone; set '
            'engine.kind = "native"'
        )
    if not place.is_here or place.scorers:
        yield f"{asks} keeps images on this machine, and orchestration brings workers of others; remove orchestration.kind, its bus and its workers"
    if environment.kind != "single_turn":
        yield (
            f"{asks} shows the images of a row, and {environment.setting} makes messages of its own, which hold text alone; remove it, or set "
            "environment.function, whose messages and tools show them"
        )
    if train.parallel.ranks > 1:
        yield f"{asks} is for a trainer in one process, and train.parallel makes {train.parallel.ranks}; remove it"
    if train.weights != "float32" or train.offload_optimizer:
        yield f"{asks} trains weights in float32; remove train.weights and train.offload_optimizer"
    if train.parity != "off":
        yield f'{asks} is served without the kernels for which train.parity = "bitwise" is proven; set it to "off"'
    if engine.weights != "published" or engine.path in ("kernels", "fused"):
        yield f'{asks} is served by engine.path = "hf" or "cache", which read features; remove engine.path and engine.weights'
    if judges:
        yield (
            f"{asks} shows images to the policy, and the judge {judges[0].name} reads text alone: it would judge what it does not see; use a function or a "
            "service, which get the files, and remove it from reward.judges"
        )
    for what, used in zip(_OTHER, other, strict=True):
        if used:
            yield f"{asks} trains all weights of the language part on one task, and {what} something else; remove it"


def _listed(columns: Sequence[str]) -> str:
    return f"[{', '.join(map(repr, columns))}]".replace("'", '"')


def model_of(
    path: str,
    task: TaskConfig,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    adapted: bool,
    for_weights: bool = False,
) -> Path:
    """Returns the directory that engine and trainer load: that of the model, or, if it sees, of its language part with the images of the task.
    `rows`: those that were passed from Python; `adapted`: whether adapters are trained; `for_weights`: of the weights alone, whose images are not
    needed. Raises ConfigError with the remedy."""
    found = resolve_model(path)
    if adapted and type_of(found) in (SERVED if task.images else ALWAYS_APART):
        raise ConfigError(
            f"model.path = {path} is a model that sees, of which all weights of the language part are trained, and no adapters: remove lora.rank"
        )
    asks = f"task.images = {_listed(task.images)}" if task.images else ""
    return with_images(found, lambda: () if for_weights else images_in(task, rows), asks)
