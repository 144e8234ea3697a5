"""Devices that engine and trainer share, or that the trainer lends: what these two settings exclude."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.engine.config import EngineConfig
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.trainer.config import TrainConfig
from headrace.weight_sync.config import Way

_PLACED = 'orchestration.placement = "shared"'
_LENT = "orchestration.lend = true"


def device_problems(
    place: OrchestrationConfig, engine: EngineConfig, train: TrainConfig, way: Way, *, taught: bool, referenced: bool
) -> Iterator[str]:
    """Yields a sentence for each setting that excludes one of the two. `way`: how weights travel; `taught`: whether there are teachers;
    `referenced`: whether the reference has an engine."""
    beside = "teachers have" if taught else "algo.kl.place = reward has" if referenced else ""
    yield from _placement_problems(place, engine, train, way, beside)
    yield from _lending_problems(place, engine, train, way, taught)


def _placement_problems(
    place: OrchestrationConfig, engine: EngineConfig, train: TrainConfig, way: Way, beside: str
) -> Iterator[str]:
    """`beside`: the settings that have further engines, with their verb; empty if none have."""
    if place.placement != "shared":
        if place.kv != "host":
            yield f'orchestration.kv = "{place.kv}" is about an engine that sleeps; set {_PLACED} too, or remove it'
        return
    if place.elsewhere or place.bus:
        what = "orchestration.bus" if place.bus else f'orchestration.kind = "{place.kind}"'
        yield f"{_PLACED} is for one machine, and {what} brings engines of others; remove one of the two"
    elif engine.is_server:
        yield (
            f'{_PLACED} puts headrace\'s own engine to sleep, and engine.kind = "{engine.kind}" is a server, whose memory the run does not manage; '
            'use engine.kind = "native", or remove it'
        )
    elif not way.transport.keeps_for_sleepers:
        yield f'{_PLACED} takes weights from shared memory when the engine wakes, and weight_sync.kind = "{way.kind}" is another way; leave it out'
    if engine.is_fleet:
        yield f"{_PLACED} is for one engine; remove engine.replicas, or placement"
    if train.parallel.ranks > 1:
        yield f"{_PLACED} is for a trainer in one process, and train.parallel makes {train.parallel.ranks}; remove one of the two"
    if beside:
        yield f"{_PLACED} does not put the engines to sleep that {beside}; remove them, or placement"
    for name, own in (("engine", engine), ("train", train)):
        if own.cores:
            yield f"{name}.cores divides what {_PLACED} gives to engine and trainer in turns; remove one of the two"
    if "auto" not in (engine.device, train.device) and engine.device != train.device:
        yield f'{_PLACED} is for one device, and engine.device = "{engine.device}" is not train.device = "{train.device}"; leave them out'


def _lending_problems(
    place: OrchestrationConfig, engine: EngineConfig, train: TrainConfig, way: Way, taught: bool
) -> Iterator[str]:
    ranks = train.parallel.ranks
    if not place.lend:
        if place.give_way != type(place).give_way:
            yield f"orchestration.give_way is about an engine on devices that the trainer lends; set {_LENT} too, or remove it"
        return
    if place.placement == "shared":
        yield f"{_PLACED} gives the engine the trainer's devices whenever that waits, and so does {_LENT}; remove one of the two"
    if place.bus:
        yield f"{_LENT} adds an engine to the run's own, and with orchestration.bus it has none; remove one of the two"
    elif engine.is_server:
        yield (
            f'{_LENT} adds an engine of headrace\'s own, and engine.kind = "{engine.kind}" is a server, which computes otherwise; use '
            'engine.kind = "native", or remove it'
        )
    elif way.transport.waits_for_all:
        yield f'{_LENT} has an engine that comes and goes, and weight_sync.kind = "{way.kind}" waits for all; leave it out, or take "tcp"'
    if not place.trains_here:
        yield f'{_LENT} is for a trainer of this machine, and orchestration.trainer = "elsewhere"; remove one of the two'
    elif ranks > 1:
        yield f"{_LENT} is for a trainer in one process, and train.parallel makes {ranks}; remove one of the two"
    if taught:
        yield f"{_LENT} lets the trainer sleep while it waits, and teachers may need its older weights then; remove them, or lend"
