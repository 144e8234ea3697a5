"""Describes a run in words: its headline, and where its parts run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headrace.engine.config import EngineConfig
from headrace.engine.remote.server_kind import server_kind
from headrace.episodes.scoring.config import RewardConfig
from headrace.facts.facts import RunStarted, WeightWay
from headrace.facts.texts import plural
from headrace.models.resolve import short_name
from headrace.native.resources import usable_cores
from headrace.processes.joining.joined import ONE_MACHINE
from headrace.processes.orchestration_config import OrchestrationConfig
from headrace.run.config import RunConfig
from headrace.run.fleets.core_shares import in_words, members_of
from headrace.trainer.config import TrainConfig
from headrace.weight_sync.config import Way, WeightSyncConfig


def headline(config: RunConfig) -> str:
    model, task = short_name(config.model.path), config.task
    prompts = task.name or Path(task.path).name or task.rows.partition(" ")[2].strip("()")  # `100 rows`
    if task.facts.draws_seeds:
        prompts = Path(config.environment.name).name or config.environment.function.rpartition(":")[2]
        prompts = prompts or config.environment.kind
    return f"{model} · {prompts} · {config.algo.name} · max lag {config.staleness.max_lag}"


def placement(config: RunConfig, path: str) -> dict[str, str]:
    """Returns the process and device of each part of the run, in words."""
    return {
        "controller": "this process",
        "engine": _engine(config.engine, config.orchestration, path),
        "trainer": _trainer(config.train, config.orchestration),
        **(
            {"lent": "an engine more in a process of its own, on the trainer's devices while it waits"}
            if config.orchestration.lend
            else {}
        ),
        "weights": _weights(config.weight_sync, config.way, config.ends.adapters),
        "scorer": _scorer(config.reward),
        **{
            f"teacher {teacher.name}": f"own process, {teacher.asked}, by {teacher.mode}" for teacher in config.teachers
        },
    }


def _trainer(train: TrainConfig, place: OrchestrationConfig) -> str:
    parallel = train.parallel
    copies = f"{parallel.replicate} × " if parallel.replicate > 1 else ""
    ways = {
        f"FSDP2, {copies}weights split in {parallel.gathering}": parallel.gathering > 1,
        f"layers split in {parallel.tensor} by the model's plan": parallel.tensor > 1,
        "experts whole": parallel.expert > 1,
        f"microbatches in {parallel.context}": parallel.context > 1,
    }
    ways[f"{'' if parallel.gathering > 1 else copies}a pipeline of {parallel.pipeline}, {parallel.schedule}"] = (
        parallel.pipeline > 1
    )
    split = ", ".join(way for way, used in ways.items() if used)
    who = "own process" if parallel.ranks == 1 else f"{parallel.ranks} ranks ({split})"
    dtype = train.dtype if train.dtype != "auto" else "bfloat16 where the hardware has it"
    if not place.trains_here:
        who = "a process" if parallel.ranks == 1 else who
        return f"{who} {place.place.words(place, place.rank_gpus)}, {train.device}, {dtype}"
    return f"{who}, {_place(train.device, train.cores, train.threads)}, {dtype}"


def _engine(engine: EngineConfig, place: OrchestrationConfig, path: str) -> str:
    if place.bus:
        own = f" with a {engine.kind} server each" if engine.is_server else ""
        return f"rollout hosts on {place.bus}{own}, {engine.serving_dtype}, {path}"
    if place.elsewhere:
        what = f"{engine.kind} server" if engine.is_server else "engine"
        count = f"{engine.replicas} {what}s" if engine.is_fleet else f"a{'n' * (what == 'engine')} {what}"
        return f"{count} {place.place.words(place, place.gpus)}, {engine.serving_dtype}, {path}"
    if engine.is_server:
        own = "that this run starts" + (f" ({in_words(members_of(engine))})" if engine.is_fleet else "")
        which = ", ".join(engine.urls) or own
        return f"{engine.kind} server{'s' if engine.is_fleet else ''} {which}, {engine.serving_dtype}, {path}"
    if engine.is_fleet:
        return f"{engine.replicas} own processes, {in_words(members_of(engine))}, {engine.serving_dtype}, {path}"
    return f"own process, {_place(engine.device, engine.cores, engine.threads)}, {engine.serving_dtype}, {path}"


def _scorer(reward: RewardConfig) -> str:
    processes = plural(reward.workers, "worker") if reward.specs or not reward.endpoints else ""
    return ", ".join(
        filter(None, [processes, *(f"{endpoint.name} at {endpoint.url}" for endpoint in reward.endpoints)])
    )


def weight_way(way: Way, encoding: str) -> WeightWay:
    transport = way.transport
    travels: Literal["bytes", "files", "nothing"] = "bytes" if transport.sends_bytes else "nothing"
    return WeightWay(way.kind, encoding, transport.words, "files" if transport.writes_files else travels)


def _weights(settings: WeightSyncConfig, way: Way, adapters: bool) -> str:
    if adapters:
        form = "base once, then adapters"
    elif settings.encoding == "delta":
        form = f"deltas, full after {settings.anchor_every}"
    else:
        form = way.transport.keeps
    return f"{way.transport.words}: {form} ({way.why})"


def untried(engine: EngineConfig, place: OrchestrationConfig, way: Way) -> list[str]:
    """Returns a sentence for each part of the run that was never tried on the real thing."""
    transport = way.transport
    server = server_kind(engine.kind).untried if engine.is_server else ""
    found = {
        f'engine.kind = "{engine.kind}"': server,
        f"weights by {transport.words}": transport.untried,
        "workers elsewhere": ONE_MACHINE if place.bus else place.place.untried,
    }
    return [f"{what} never met {missing}" for what, missing in found.items() if missing]


def machine_change(before: RunStarted, now: RunStarted) -> str:
    """A sentence if the machine, or the way to compute, has changed since the previous process; else an empty string."""
    changed = [
        f"{name} was {before.machine[name]}, now {value}"
        for name, value in now.machine.items()
        if before.machine.get(name, value) != value
    ]
    changed += [
        f"{part}: it was {before.where[part]}, now {now.where[part]}"
        for part in ("engine", "trainer")
        if before.where.get(part, now.where[part]) != now.where[part]
    ]
    if not changed:
        return ""
    return (
        f"the run is resumed under other conditions ({'; '.join(changed)}): dtype, kernels and threads stay as they were chosen, unless "
        "settings change them, and steps are equal within rounding, not bit for bit"
    )


def _place(device: str, cores: Sequence[int], threads: int) -> str:
    cpu = f"CPU cores {', '.join(map(str, cores))}" if cores else f"all {usable_cores()} CPU cores, shared"
    cpu += f", {plural(threads, 'thread')}" if threads else ""
    return {"cpu": cpu, "cuda": "cuda", "auto": f"cuda if there is one, else {cpu}"}[device]
