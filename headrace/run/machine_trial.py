"""The trial of the machine, for a rehearsal: values for settings that were left open, memory, and rows that are too long to be sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headrace.engine.remote.server_kind import server_kind
from headrace.engine.servers.installed import require
from headrace.loop.run_limits import SHORT
from headrace.native.resources import gib
from headrace.processes.frames import LONGEST
from headrace.run.auto.gpu_sizes import gpu_notes
from headrace.run.auto.measurer import Measurer, measure_share
from headrace.run.choosing import fit_minutes, settle, settle_sizes
from headrace.run.config import RunConfig
from headrace.run.fleets.core_shares import nothing_to_lend, share_problems
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearsal.memory_needs import (
    MemoryNeed,
    ModelShape,
    checkpoint_bytes,
    engine_needs,
    memory_plan,
    needs,
    notes,
    read_shape,
    refusals,
    warm_lines,
)
from headrace.run.rehearsal.words import memory_lines
from headrace.run.rehearsed import Rehearsal
from headrace.run.wording import placement, untried
from headrace.trainer.dealing.share import MOST_TRAJECTORIES, TOKEN_BYTES
from headrace.weight_sync.cuda_ipc import NO_GPU
from headrace.weight_sync.delta.efficiency import poor_settings


def choose(found: Rehearsal, machine: Machine, model_dir: Path, measurer: Measurer) -> None:
    """Chooses the settings that are left open, and puts them into the config."""
    shape = read_shape(model_dir)
    settled = settle(found.config, model_dir, machine, shape.parameters, measurer)
    beside = _others(found, machine, model_dir, shape)
    config = settle_sizes(settled, shape, machine, found.prompt_tokens, _on_gpu(beside))
    settled = replace(settled, config=config)
    found.config, found.unmeasured = settled.config, settled.figures.problem
    if not found.config.train.minutes:
        return
    size = checkpoint_bytes(shape, memory_plan(found.config, machine))
    fitted = fit_minutes(settled, measure_share(machine.cores), size, found.prompt_tokens)
    found.config = fitted.config
    found.notes += fitted.notes
    found.keys |= dict.fromkeys(fitted.notes, SHORT)


def machine_and_memory(found: Rehearsal, machine: Machine, model_dir: Path) -> None:
    config, shape = found.config, read_shape(model_dir)
    plan = memory_plan(config, machine)
    resolved = replace(
        config,
        engine=replace(config.engine, device=plan.engine_device),
        train=replace(config.train, device=plan.train_device, dtype=plan.train_dtype)  # type: ignore[arg-type]
        if plan.trains
        else config.train,
    )
    why = {**({"not measured": found.unmeasured} if found.unmeasured else {}), **config.chosen.why}
    found.sections["Where"] = [
        *placement(resolved, found.served or "path chosen when the model is read").items(),
        *why.items(),
    ]
    wanted = [*needs(shape, plan), *_others(found, machine, model_dir, shape)]
    size = checkpoint_bytes(shape, plan)
    found.sections["Memory"] = [
        *memory_lines(wanted, machine),
        *warm_lines(shape, plan),
        ("on disk", f"{gib(size)} a checkpoint, at most {config.checkpoint.keep + 1} at a time"),
    ]
    problems = list(refusals(wanted, shape, plan, machine))
    if plan.published == "cuda" and "cpu" in (plan.engine_device, plan.train_device):
        problems.append(NO_GPU)
    if not config.orchestration.elsewhere:  # else each has a machine of its own
        problems += share_problems(config.engine, plan.engine_device)
    problems += nothing_to_lend(
        config.orchestration, config.engine.cores, config.train.cores, plan.engine_device, plan.train_device
    )
    problems += _step_problems(config, shape)
    for problem in problems:
        found.doubt(problem, certain=True)
    form, dtype = config.weight_sync.form, config.engine.serving_dtype
    found.notes += poor_settings(form, dtype, adapted=bool(config.lora.rank))
    found.notes += untried(config.engine, config.orchestration, config.way)
    if not problems:
        found.notes += notes(wanted, machine, plan.shared or plan.lent)
        found.notes += gpu_notes(wanted, machine, config)
    place = config.orchestration
    if config.engine.starts_server and not (place.bus or place.elsewhere):  # else those who start it look themselves
        server = require(config.engine.kind, config.engine.python, not config.way.transport.writes_files)
        kind, opening = server_kind(config.engine.kind), plan.published == "cuda"
        if problem := kind.cannot_serve(server, shape.experts, sleeping=plan.shared, opening=opening):
            found.doubt(problem, certain=True)
        line = ("server", f"{server.python}, {config.engine.kind} {server.version}".rstrip())
        found.sections["Where"] = [*found.sections["Where"], line]


def _step_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Yields what cannot be sent to the trainer once a step has been sampled."""
    routed = shape.layers * shape.chosen * (1 if shape.experts <= 256 else 2) if config.rollout.keep_routing else 0
    longest = min(config.longest_rollout, config.engine.context_length or config.longest_rollout)
    if (size := longest * (TOKEN_BYTES + routed)) > LONGEST:
        experts = ", or set rollout.keep_routing = false" if routed else ""
        yield (
            f"a rollout of {longest} tokens can become a row of {size / 1e9:.1f} GB, and a message to the trainer has at most {LONGEST / 1e9:.1f} GB; "
            f"lower rollout.max_tokens or engine.context_length{experts}"
        )
    rollouts = config.staleness.groups_per_step * config.rollout.group_size
    if rollouts >= MOST_TRAJECTORIES:
        yield (
            f"a step of {rollouts} rollouts has more than the {MOST_TRAJECTORIES - 1} that ranks can tell apart; lower "
            "staleness.groups_per_step or rollout.group_size"
        )


def _others(found: Rehearsal, machine: Machine, model_dir: Path, shape: ModelShape) -> Iterator[MemoryNeed]:
    """The memory of the engines of teachers and reference."""
    for planned in found.planned_teachers:
        device = machine.device(f"the teacher {planned.config.name}: engine.device", planned.engine.device)
        yield from engine_needs(f"teacher {planned.config.name}", read_shape(planned.model_dir), planned.engine, device)
    if found.config.algo.reference_in_reward and not found.config.lora.served_name:
        engine = found.config.engine_beside.for_worker
        yield from engine_needs("reference", shape, engine, machine.device("engine.device", engine.device))


def _on_gpu(others: Iterator[MemoryNeed]) -> tuple[float, ...]:
    """The bytes on the GPU of each process that has some there."""
    held: dict[str, float] = {}
    for need in others:
        if need.where == "cuda":
            held[need.who] = held.get(need.who, 0.0) + need.bytes
    return tuple(held.values())
