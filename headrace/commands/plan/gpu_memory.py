"""The memory of GPUs that are planned for: the sizes that settings leave open, as a run on such GPUs would choose them, and what stays unused."""

from __future__ import annotations

from dataclasses import replace

from headrace.commands.plan.rates import hardware
from headrace.commands.plan.rates.hardware import Gpu
from headrace.commands.plan.rates.shapes import Architecture
from headrace.run.auto.gpu_sizes import MICROBATCHES, SLACK, Asking, asking_of, gpu_sizes, values_of
from headrace.run.config import RunConfig
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import MemoryPlan, ModelShape, memory_plan, needs, token_activations
from headrace.trainer.config import ON_CPU

PROMPT = 200
"""Tokens of a usual prompt, where nothing says otherwise: as in the simulation."""


def sized(config: RunConfig, chip: Gpu, model: Architecture, *, gpus: int, trainer: int) -> RunConfig:
    """Returns the config with numbers for what it leaves open. `gpus`: of one engine, 0 if it shares one with the trainer; `trainer`: of the
    trainer, if it has its own."""
    plan, shape, asking, machine = _parts(config, chip, model, gpus)
    found = gpu_sizes(plan, shape, machine, asking, engine=True)
    values = values_of(plan.engine, found)
    config = replace(config, engine=replace(config.engine, **values))
    if config.train.microbatch_tokens != "auto":
        return config
    microbatch = found.microbatch
    if gpus:
        mesh = hardware.trainer_mesh(chip, model, trainer, context=config.train.parallel.context)
        memory = hardware.trainer_memory(model, mesh)
        left = hardware.TRAINING_USABLE * chip.memory - memory.held - memory.gathered
        token = SLACK * hardware.BFLOAT16 * token_activations(model, config.train.gradient_checkpointing) / mesh.tensor
        microbatch = next((size for size in MICROBATCHES if size * token <= left), ON_CPU)
    return replace(config, train=replace(config.train, microbatch_tokens=microbatch))


def unused(config: RunConfig, chip: Gpu, model: Architecture, gpus: int) -> str:
    """Returns a sentence on what a run leaves of its engine's memory, if that is more than half; else an empty string. `gpus`: see `sized`."""
    plan, shape, _, machine = _parts(config, chip, model, gpus)
    held = sum(need.bytes for need in needs(shape, plan) if need.where == "cuda")
    assert machine.gpu is not None
    total = machine.gpu[1]
    if total - held < total / 2:
        return ""
    where = "the GPU" if gpus < 2 else f"the {gpus} GPUs of an engine"
    return (
        f"{(total - held) / 1e9:.0f} of {total / 1e9:.0f} GB of {where} are unused: engine.kv_gib is {config.engine.sizes.kv_gib:g}, for "
        f"{config.engine.sizes.max_running} sequences"
    )


def _parts(
    config: RunConfig, chip: Gpu, model: Architecture, gpus: int
) -> tuple[MemoryPlan, ModelShape, Asking, Machine]:
    """The inputs of the run's own arithmetic. `gpus` of an engine count as one large one."""
    shape = ModelShape(
        parameters=int(model.parameters),
        matrices=(),
        layers=model.layers,
        hidden=model.hidden,
        inner=model.inner,
        experts=0,
        cached=model.cache_bytes // hardware.BFLOAT16,
        positions=0,
        vocabulary=int(model.outer / model.hidden),
    )
    memory = int(chip.memory * max(1, gpus))
    machine = Machine(1, 1 << 62, 1 << 62, (chip.name, memory), {"bfloat16": True, "built_for": "", "free": memory})
    one = replace(
        config, engine=replace(config.engine, device="cuda", replicas=1), train=replace(config.train, device="cuda")
    )
    plan = memory_plan(one, machine)
    return plan._replace(trains=not gpus), shape, asking_of(config, shape, PROMPT), machine
