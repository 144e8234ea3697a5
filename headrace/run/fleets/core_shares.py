"""The settings of the members of a fleet: a server each, or a share of this machine each; and those of one on lent devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from headrace.engine.config import EngineConfig
from headrace.engine.engine_problems import ON_GPUS
from headrace.native.resources import usable_cores
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.processes.places import kinds_elsewhere
from headrace.trainer.config import TrainConfig


def members_of(config: EngineConfig) -> dict[str, EngineConfig]:
    """The settings of every member, by its name; one without a name if the run has one engine."""
    if len(config.urls) > 1:
        return {url: dataclasses.replace(config, urls=(url,)) for url in config.urls}
    if config.replicas == 1:
        return {"": config}
    shares = zip(split(config.cores, config.replicas), split(config.gpus, config.replicas), strict=True)
    threads = max(1, (config.threads or usable_cores()) // config.replicas)
    return {
        str(number): dataclasses.replace(config, replicas=1, cores=cores, gpus=gpus, threads=len(cores) or threads)
        for number, (cores, gpus) in enumerate(shares, 1)
    }


def split(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Neighbouring cores, or GPUs, for each of `count` members; the first ones have one more where they cannot be shared evenly."""
    least, more = divmod(len(cores), count)
    ends = [0]
    for number in range(count):
        ends.append(ends[-1] + least + (number < more))
    return [tuple(cores[begin:end]) for begin, end in itertools.pairwise(ends)]


def share_problems(config: EngineConfig, device: str) -> Iterator[str]:
    """Yields why replicas cannot share a machine whose engines run on `device` (`cpu` or `cuda`)."""
    if config.replicas == 1:
        return
    if device == "cuda" and not config.is_server:
        yield ON_GPUS
    elif device == "cuda" and not config.gpus:
        yield "engine.replicas would start all servers on the same GPUs; say which they may use: engine.gpus = [0, 1, ...], shared evenly"
    elif device == "cpu" and config.kind == "vllm" and not config.cores:
        yield "every vLLM server takes all cores unless it is given some; share them out: engine.cores = [0, 1, ...]"


def in_words(members: dict[str, EngineConfig]) -> str:
    """The choice for the members on this machine."""
    parts = []
    for name, member in members.items():
        gpus = f"GPU {', '.join(map(str, member.gpus))}, " if member.gpus else ""
        cores = f"cores {', '.join(map(str, member.cores))}" if member.cores else "no cores of its own"
        parts.append(f"engine {name}: {gpus}{cores}, {member.threads} thread{'s' if member.threads > 1 else ''}")
    return "; ".join(parts)


def settings_of_lent(engine: EngineConfig, train: TrainConfig) -> EngineConfig:
    """The settings of the engine on lent devices: those of the run's engines, on the trainer's devices."""
    threads = len(train.cores) or train.threads
    return dataclasses.replace(engine, replicas=1, device=train.device, cores=train.cores, threads=threads)


def nothing_to_lend(
    place: OrchestrationConfig, engine_cores: Sequence[int], train_cores: Sequence[int], engine: str, trainer: str
) -> Iterator[str]:
    """Yields why the trainer has no devices of its own that it could lend. `engine`, `trainer`: what they run on (`cpu` or `cuda`)."""
    if not place.lend or place.elsewhere or engine != trainer:
        return
    if trainer == "cuda":
        yield (
            "orchestration.lend lends the trainer's GPU, on which the engine of the same machine runs anyway; bring the engines from elsewhere "
            f"({kinds_elsewhere()}), or remove it"
        )
    elif not (engine_cores and train_cores):
        yield (
            "orchestration.lend lends the trainer's cores, and it has none of its own: without engine.cores and train.cores the engine has all cores "
            "as soon as the trainer waits; remove it, or set both"
        )
