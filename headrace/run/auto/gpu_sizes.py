"""The sizes that a run leaves open, on a GPU of this machine: KV cache, sequences, prompt tokens of a pass, tokens of a microbatch.

Computed before anything is started, from the memory that is free: engine, trainer and teachers start at the same time, and none of them can
see what the others will take.

    free − reserve ──▶ weights, optimizer, published copies, teachers ──▶ activations of a microbatch ──▶ KV cache: the rest

Engine and trainer that take turns each have what the other one gives back. What a size brings is measured (`gpu_rates.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.remote.server_kind import server_kind
from headrace.engine.sizes import BLOCK, Cost, Demand, Sizes, cost, fitting, longest, usable
from headrace.models.lora import LoraConfig
from headrace.native.resources import GIB, gib
from headrace.run.config import RunConfig
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import (
    ACTIVATIONS,
    BYTES,
    KV,
    LENT,
    MemoryNeed,
    MemoryPlan,
    ModelShape,
    memory_plan,
    needs,
    step_activations,
)
from headrace.trainer.config import ON_CPU, TrainConfig

SIZES = ("engine.kv_gib", "engine.max_running", "engine.prefill_chunk", "train.microbatch_tokens")
"""The settings that are chosen by the memory of a GPU."""
MICROBATCHES = (32768, 16384, 8192, 4096)
"""Tokens of a microbatch that are chosen on a GPU: the first that fits."""
SLACK = 2
"""Factor on the activations: they are planned with this times their estimate, which counts what is kept for the backward pass alone."""
BESIDE, ALONE = 0.5, 0.9
"""The largest share that activations are given of what weights and optimizer leave: beside an engine, and in a trainer that has the GPU to itself."""
OF_SERVER = 3 * GIB
"""Bytes that vLLM takes of a GPU beside weights and cache: its trial of the largest batch, and its graphs (assumed)."""
OF_HOST = 0.5
"""The share of the free memory of the machine that the cache of a sleeping engine may take (`orchestration.kv = "host"`)."""


class Asking(NamedTuple):
    """The load that the sizes follow from, and other users of the memory."""

    context: int
    usual: float
    most: int
    keeps: bool
    """Whether a sleeping engine keeps its cache on the host."""
    others: float = 0.0
    """Bytes on the GPU of teachers and reference."""
    processes: int = 0
    """The number of those."""


class GpuSizes(NamedTuple):
    engine: Sizes | None
    """None for an engine that is not on this GPU, or that decides itself."""
    microbatch: int
    longest: int
    """The most tokens of a sequence that the cache holds."""
    room: float
    """Bytes for the cache and for what a pass takes."""
    trains: bool
    """Whether the trainer has room for its microbatches."""


def with_gpu_sizes(
    config: RunConfig, shape: ModelShape, machine: Machine, prompt_tokens: int, others: tuple[float, ...] = ()
) -> tuple[dict[str, Any], str]:
    """Returns the values of settings that are left open, by their dotted names, and why; nothing where no part is on a GPU of this machine.
    `prompt_tokens`: of a usual prompt; `others`: bytes on the GPU of each engine beside the run's.

    Raises ConfigError, with a remedy that was tried, if the cache would not hold one sequence."""
    plan = memory_plan(config, machine)
    engine, trainer = (
        _engine_is_on(plan, elsewhere=config.orchestration.elsewhere),
        plan.trains and plan.train_device == "cuda",
    )
    if machine.gpu is None or not (engine or trainer):
        return {}, ""
    asking = asking_of(config, shape, prompt_tokens, others)
    sizes = gpu_sizes(plan, shape, machine, asking, engine=engine)
    values = {f"engine.{name}": size for name, size in values_of(plan.engine, sizes).items()}
    if "engine.kv_gib" in values and sizes.longest < asking.context:
        raise ConfigError(_too_little(plan, shape, machine, asking, prompt_tokens + config.rollout.max_tokens))
    if trainer and config.train.microbatch_tokens == "auto":
        values["train.microbatch_tokens"] = sizes.microbatch
    said = ", ".join(f"{name} = {value:g}" for name, value in values.items())
    return (
        values,
        f"{said}: by what is free of the GPU, {gib(machine.gpu_free)} of {gib(machine.gpu[1])}" if said else "",
    )


def _engine_is_on(plan: MemoryPlan, *, elsewhere: bool) -> bool:
    """Whether the run's engine is on the first GPU of this machine, and leaves it to the run how much it takes."""
    engine = plan.engine
    if plan.engine_device == "cpu" or elsewhere or engine.urls:
        return False
    ranks = range(plan.train.parallel.ranks if plan.trains and plan.train_device == "cuda" else 0)
    return not engine.gpus or bool(set(engine.gpus) & set(ranks))


def values_of(engine: EngineConfig, found: GpuSizes) -> dict[str, Any]:
    """Returns the chosen values of the settings of an engine that are open."""
    if found.engine is None:
        return {}
    asked = engine.open_sizes._asdict()
    left = {name for name, size in asked.items() if size is None} & _has(engine)
    return {name: size for name, size in found.engine._asdict().items() if name in left}


def _has(engine: EngineConfig) -> set[str]:
    """The names of the sizes that this kind of engine has."""
    starts = server_kind(engine.kind).starts if engine.is_server else None
    return set(Sizes._fields if starts is None or starts.settings is None else starts.settings) & set(Sizes._fields)


def asking_of(config: RunConfig, shape: ModelShape, prompt_tokens: int, others: tuple[float, ...] = ()) -> Asking:
    context = min(config.engine.context_length, shape.positions or config.engine.context_length)
    rollouts = sum(run.staleness.generating * run.rollout.group_size for run in config.runs)
    evaluated = sum(run.eval.prompts * run.eval.samples + run.eval.beside for run in config.runs)
    return Asking(
        context=context,
        usual=min(context, prompt_tokens + config.longest_rollout / 2),
        most=max(1, rollouts, evaluated),
        keeps=config.orchestration.kv == "host" and not config.engine.is_server,
        others=sum(others),
        processes=len(others),
    )


def gpu_sizes(plan: MemoryPlan, shape: ModelShape, machine: Machine, asking: Asking, *, engine: bool) -> GpuSizes:
    """`engine`: whether the engine is on the GPU. Whatever settings say is taken as it is."""
    assert machine.gpu is not None
    trainer = plan.trains and plan.train_device == "cuda"
    both, turns = engine and trainer, plan.shared
    held = dict.fromkeys(("trainer", "between", "engine"), 0.0)
    for need in needs(shape, plan):
        if need.where == "cuda" and need.what not in (KV, ACTIVATIONS):
            who = need.who if need.who in held else "engine"
            held[who] += need.bytes if who != "engine" or engine else 0.0
    room = usable(machine.gpu_free, machine.gpu[1], asking.processes + engine + trainer)
    room -= asking.others + held["between"]
    token = SLACK * step_activations(shape, plan.critic, plan.train.gradient_checkpointing) * BYTES[plan.train_dtype]
    left = room - held["trainer"] - (held["engine"] if both and not turns else 0.0)
    left -= OF_SERVER if both and turns and plan.engine.is_server else 0.0  # its graphs stay while it sleeps
    share = BESIDE if both and not turns else ALONE
    microbatch = next((size for size in MICROBATCHES if size * token <= share * left), ON_CPU)
    if plan.train.microbatch_tokens != "auto":
        microbatch = plan.train.microbatch_tokens
    trains = not trainer or token * microbatch <= left
    if not engine:
        return GpuSizes(None, microbatch, 0, 0.0, trains)
    room -= held["engine"] + (OF_SERVER if plan.engine.is_server else 0.0)
    if both and not turns:  # a row that is longer than a microbatch has one of its own
        room -= held["trainer"] + token * max(microbatch, asking.context)
    if turns and asking.keeps:
        room = min(room, OF_HOST * machine.available)
    one = _cost(shape, plan)
    sizes = fitting(plan.engine.open_sizes, room, one, Demand(asking.context, asking.usual, asking.most))
    return GpuSizes(sizes, microbatch, longest(sizes, one), room, trains)


def gpu_notes(found: Sequence[MemoryNeed], machine: Machine, config: RunConfig) -> Iterator[str]:
    """Yields sentences about a GPU that may be too small for what a run holds there (`found`), or of which a run whose engine is there leaves
    more than half unused; and about a trainer whose GPUs nobody sees from here. `config`: with what was chosen."""
    if not config.orchestration.trains_here and config.train.microbatch_tokens == "auto":
        yield f"train.microbatch_tokens is {config.train.microbatch}: it is not chosen by the memory of GPUs of other machines; set it for those"
    held: dict[str, float] = {}
    for need in found:
        if need.where == "cuda":
            who = "engine" if need.who.startswith(("engine", LENT)) else need.who
            held[who] = held.get(who, 0.0) + need.bytes
    if machine.gpu is None or not held:
        return
    used = sum(held.values())
    if config.orchestration.placement == "shared" or config.orchestration.lend:
        used -= min(held.get("trainer", 0.0), held.get("engine", 0.0))
    total, free = machine.gpu[1], machine.gpu_free
    if used > free:
        yield (
            f"the processes may take {gib(used)} of the GPU, and {gib(free)} of {gib(total)} are free now. If its memory runs out, one of them "
            'ends: lower engine.kv_gib or train.microbatch_tokens (without a value, or with "auto", a new run takes what is free), or end what '
            "else uses the GPU"
        )
    elif free - used > total / 2 and _engine_is_on(
        memory_plan(config, machine), elsewhere=config.orchestration.elsewhere
    ):
        yield f"{(free - used) / GIB:.0f} of {total / GIB:.0f} GiB of the GPU are unused: {_would_use(config.engine, config.train, config.chosen.wishes)}"


def _would_use(engine: EngineConfig, train: TrainConfig, wishes: Mapping[str, Any]) -> str:
    """`wishes`: what settings that were chosen had been."""
    values = {f"engine.{name}": size for name, size in engine.open_sizes._asdict().items() if size is not None}
    if train.microbatch_tokens != "auto":
        values["train.microbatch_tokens"] = train.microbatch
    if fixed := [f"{name} = {size:g}" for name, size in values.items() if wishes.get(name) != "auto"]:
        return f'{", ".join(fixed)} keep it so; "auto" takes what is free'
    return "more rollouts at once would use them (staleness.groups_per_step, rollout.group_size), or a larger model"


def _cost(shape: ModelShape, plan: MemoryPlan) -> Cost:
    size = BYTES[plan.engine.serving_dtype]
    token = shape.cached * size + shape.state / plan.engine.context_length
    return cost(token, shape.hidden, shape.inner, shape.vocabulary, size)


def _too_little(plan: MemoryPlan, shape: ModelShape, machine: Machine, asking: Asking, least: int) -> str:
    """`least`: tokens that a sequence must be allowed."""
    assert machine.gpu is not None
    sizes, needed = gpu_sizes(plan, shape, machine, asking, engine=True), _cost(shape, plan).sequence(asking.context)
    remedy = "take a smaller model, or a GPU with more memory"
    for words, smaller, context in _smaller(plan, asking.context, least):
        found = gpu_sizes(smaller, shape, machine, asking._replace(context=context), engine=True)
        if found.longest >= context and found.trains:
            remedy = words
            break
    cache = sizes.engine.kv_gib * GIB if sizes.engine else 0.0
    return (
        f"{gib(cache)} of the GPU are left for the KV cache, beside all that this run holds there ({gib(machine.gpu_free)} of "
        f"{gib(machine.gpu[1])} are free now), and one sequence of engine.context_length = {asking.context} takes {gib(needed)}: {remedy}"
    )


def _smaller(plan: MemoryPlan, context: int, least: int) -> Iterator[tuple[str, MemoryPlan, int]]:
    """Yields settings with which less is held on the GPU at once, the least changes first, and the context that each leaves, of at least
    `least` tokens."""
    if plan.train.microbatch > ON_CPU:
        train = replace(plan.train, microbatch_tokens=ON_CPU)
        yield f"set train.microbatch_tokens = {ON_CPU}", plan._replace(train=train), context
    shorter = context // 2
    while shorter >= max(least, BLOCK):
        yield f"set engine.context_length = {shorter}", plan, shorter
        shorter //= 2
    sleeps = not plan.engine.is_server or server_kind(plan.engine.kind).cannot_sleep
    if plan.trains and plan.train_device == "cuda" and not plan.shared and sleeps:
        yield 'set orchestration.placement = "shared"', plan._replace(shared=True), context
    if not plan.adapters:
        adapted = plan._replace(lora=LoraConfig(rank=16), adapters=1)
        yield "train an adapter (lora.rank = 16)", adapted, context
