"""Chooses, before a run starts, the settings that it leaves open (dtype, kernels or PyTorch, threads; on a GPU what fits into its memory) and
what fits into `train.minutes`.

The chosen settings are saved in the run's `config.toml`, beside those that were asked for (`RunConfig.chosen`). A resume and a replay read
them there and choose nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.engine.kinds import OTHERS_PATHS
from headrace.engine.own_families import OWN_FAMILIES, SURE_FAMILIES, TEXT_PARTS
from headrace.facts.texts import duration, plural
from headrace.loop.run_limits import Allowance
from headrace.native.arithmetic import TIERS
from headrace.run.auto.candidates import Figures, PartChoice, candidates, choose, choose_threads
from headrace.run.auto.fit import SPARE, Fitted, Speeds, Wish, fit
from headrace.run.auto.gpu_rates import MICROBATCHES, ROWS, GpuRates, GpuRequest, slower_compiled, worthwhile
from headrace.run.auto.gpu_sizes import SIZES, with_gpu_sizes
from headrace.run.auto.measurer import Measurer, ProbeMeasurer, Share, thread_counts
from headrace.run.config import RunConfig, check, config_of_run, read_config, read_tree
from headrace.run.rehearsal.machine import Machine, ask_torch, inspect_machine, may_have_gpu
from headrace.run.rehearsal.memory_needs import ModelShape, read_shape
from headrace.settings.other_names import meaning
from headrace.settings.process_config import ChosenConfig
from headrace.settings.toml import Tree, build, merge
from headrace.trainer.config import TrainConfig

WIDE = 28
"""Bytes per parameter of a run whose engine serves float32: 16 in the trainer, two published copies of 4, and 4 packed in the engine."""
SAVING = 200e6
"""Bytes per second for writing a checkpoint, if not measured: that of a slow or busy disk."""
UPDATES = 2
"""The time of a step beside its tokens, in optimizer updates: packing and publishing move as many bytes as one."""
START = 20.0
"""Seconds from the command to the first sampled token, if not measured: two processes import torch and load the model."""


NOT_MEASURED = GpuRates()


@dataclasses.dataclass(frozen=True)
class Settled:
    config: RunConfig
    notes: tuple[str, ...] = ()
    figures: Figures = Figures()
    rates: GpuRates = NOT_MEASURED
    """Measured rates of the GPU, if a part is on one and leaves a size open."""


def settle(config: RunConfig, model_dir: Path, machine: Machine, parameters: int, measurer: Measurer) -> Settled:
    """Chooses the settings that are left open and can be measured on a CPU, and measures what `settle_sizes` chooses by on a GPU. Explicit settings are not
    changed."""
    settled = _settled_on_cpu(config, model_dir, machine, parameters, measurer)
    return dataclasses.replace(settled, rates=_gpu_rates(settled.config, model_dir, machine, measurer))


def _gpu_rates(config: RunConfig, model_dir: Path, machine: Machine, measurer: Measurer) -> GpuRates:
    """The rates of GPUs; none where no size is left open of a part that is on a GPU of this machine."""
    engine, train = config.engine, config.train
    samples = not engine.is_server and machine.device("engine.device", engine.device) == "cuda"
    samples = samples and not config.orchestration.elsewhere and "auto" in (engine.max_running, engine.prefill_chunk)
    trains = config.orchestration.trains_here and machine.device("train.device", train.device) == "cuda"
    trains = trains and train.parallel.ranks == 1 and "auto" in (train.microbatch_tokens, train.compile)
    if machine.gpu is None or config.task.images or not (samples or trains):
        return NOT_MEASURED
    request = GpuRequest(
        config=json.loads((model_dir / "config.json").read_text(encoding="utf-8")),
        dtype=engine.serving_dtype if samples else train.dtype.replace("auto", "bfloat16"),
        path=engine.path,
        rows=ROWS if samples else (),
        microbatches=MICROBATCHES if trains else (),
        compile=trains and train.compile == "auto" and train.parity == "off",
    )
    return measurer.measure_gpu(request, machine.gpu[0])


def _settled_on_cpu(
    config: RunConfig, model_dir: Path, machine: Machine, parameters: int, measurer: Measurer
) -> Settled:
    if config.train.parity == "bitwise":
        config = _one_arithmetic(config)
    if (
        config.task.images
        and config.engine.dtype == "auto"
        and machine.device("engine.device", config.engine.device) == "cpu"
    ):
        config = config.with_chosen(
            {"engine.dtype": "float32"}, {"engine chosen": "float32, for a model that sees: not measured"}
        )
    on_cpu = {
        "engine": not config.engine.is_server
        and not config.task.images  # the way that reads features is not among the candidates
        and machine.device("engine.device", config.engine.device) == "cpu",
        "train": config.orchestration.trains_here and machine.device("train.device", config.train.device) == "cpu",
    }
    asked = [own for part, own in (("engine", config.engine), ("train", config.train)) if on_cpu[part]]
    if not asked or (not config.train.minutes and not any("auto" in (own.dtype, own.path) for own in asked)):
        return Settled(config)
    counts = thread_counts(machine.cores)
    figures = measurer.measure(json.loads((model_dir / "config.json").read_text(encoding="utf-8")), counts)
    if figures.problem:
        return Settled(config, figures=figures)
    wide = WIDE * parameters + config.engine.sizes.kv_gib * 2**30 <= machine.available
    allowed, threads = candidates(config.engine, config.train, wide), choose_threads(counts, figures)
    if on_cpu["engine"]:
        config = _taken(config, choose("engine", config.engine, allowed, figures, threads))
    if on_cpu["train"]:
        config = _taken(config, choose("trainer", config.train, allowed, figures, threads))
    return Settled(config, figures=figures)


def settle_here(config: RunConfig, model_dir: Path, measurer: Measurer | None = None) -> RunConfig:
    """Chooses the settings that are left open, for a command that does not start a run: an evaluation, a calibration. `train.minutes`
    has no meaning there. `measurer`: measures this machine; by default with a short probe."""
    config = settle_adapter(config, model_dir)
    machine, shape = inspect_machine(ask_torch() if may_have_gpu() else None), read_shape(model_dir)
    settled = settle(config, model_dir, machine, shape.parameters, measurer or ProbeMeasurer())
    return settle_sizes(settled, shape, machine)


def settle_sizes(
    found: Settled | RunConfig,
    shape: ModelShape,
    machine: Machine,
    prompt_tokens: int = 0,
    others: tuple[float, ...] = (),
) -> RunConfig:
    """Chooses the sizes that are left open of what runs on a GPU of this machine. `prompt_tokens`: of a usual prompt; `others`: bytes on the
    GPU of each engine beside the run's. Sizes that bring nothing, by the rates in `found`, are not taken. Raises ConfigError if there is no room for one sequence."""
    config, rates = (found, NOT_MEASURED) if isinstance(found, RunConfig) else (found.config, found.rates)
    values, why = with_gpu_sizes(config, shape, machine, prompt_tokens, others)
    reasons = {"sizes": why} if values else {}
    smaller = {name: size for name, size in worthwhile(rates).items() if size < values.get(name, 0)}
    if smaller:  # the cache takes what they leave
        left, _ = with_gpu_sizes(config.with_chosen(smaller, {}), shape, machine, prompt_tokens, others)
        values = {**values, **left, **smaller}
        said = ", ".join(f"{name} = {values[name]:g}" for name in values)
        reasons["sizes"] = f"{said}: by what is free of the GPU, and no more than brings at least a twentieth more"
    if config.train.compile == "auto" and slower_compiled(rates):
        values["train.compile"] = False
        reasons["compile"] = "train.compile = false: compiled layers were measured to be slower"
    if rates.words or rates.problem:
        reasons["gpu measured"] = rates.words or f"not measured: {rates.problem}"
    return config.with_chosen(values, reasons) if values else config


def settle_adapter(config: RunConfig, model_dir: Path) -> RunConfig:
    """Publishes an adapter merged where the engine computes this model by transformers, if `lora.publish` leaves that open and no other setting needs it
    beside the model. Raises ConfigError if one does, and the engine cannot serve it there."""
    lora, engine = config.lora, config.engine
    if config.adapters or not lora.rank or lora.publish != "auto" or lora.merged or engine.is_server:
        return config
    kind = json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get("model_type")
    family = TEXT_PARTS.get(kind, kind)
    if family in (SURE_FAMILIES if lora.experts else OWN_FAMILIES) and engine.path not in OTHERS_PATHS:
        return config
    through = f"{kind} through engine.path = {engine.path}" if family in OWN_FAMILIES else str(kind)
    why = f'lora.publish = "merged", because the native engine computes {through} by transformers, where an adapter takes products of its own'
    if lora.experts:
        why = f'lora.publish = "merged", because the native engine serves no adapters of experts beside {through}'
    settled = config.with_chosen({"lora.publish": "merged"}, {"adapter": why})
    if problems := check(settled):
        if not lora.experts:
            return config
        raise ConfigError("\n".join(f"{why}, and {problem}" for problem in problems))
    return settled


def _one_arithmetic(config: RunConfig) -> RunConfig:
    """Sets the path and the dtype of both parts to those that train.parity = "bitwise" requires."""
    from headrace.engine.native.kernels.binding import tier

    named = [dtype for dtype in (config.train.dtype, config.engine.dtype) if dtype != "auto"]
    named.append("bfloat16" if tier() in TIERS["bfloat16"] else "float32")
    values = {
        f"{section}.{name}": value
        for section in ("engine", "train")
        for name, value in (("path", "kernels"), ("dtype", named[0]))
        if config.value_of(f"{section}.{name}") == "auto"
    }
    return config.with_chosen(values, {"one forward pass": 'train.parity = "bitwise"'} if values else {})


def _taken(config: RunConfig, choice: PartChoice) -> RunConfig:
    section = "engine" if choice.part == "engine" else "train"
    values: dict[str, Any] = {"dtype": choice.dtype, "path": choice.path}
    values |= {"threads": choice.threads} if choice.threads else {}
    chosen = {f"{section}.{name}": value for name, value in values.items()}
    return config.with_chosen(chosen, {f"{choice.part} chosen": choice.why})


def resumed_settings(
    source: RunConfig | Mapping[str, Any] | str | Path, run_dir: Path, sets: Sequence[str] = ()
) -> Tree:
    """A config for resuming a run, to which `sets` are still to be added: it may be whole only with them. Settings that it leaves open, as the run's first config did, get the values that the run chose; sizes those
    that it had, for a run that began before they could be left open."""
    tree = read_tree(source)
    config, before = build(RunConfig, read_tree(source, sets), meaning), read_config(config_of_run(run_dir))
    tree = {**tree, "chosen": dataclasses.asdict(before.chosen)}
    for name, wish in before.chosen.wishes.items():
        if config.value_of(name) == wish:
            section, _, leaf = name.partition(".")
            tree = merge(tree, {section: {leaf: before.value_of(name)}})
    for name in SIZES:
        if config.value_of(name) == "auto" != before.value_of(name):
            section, _, leaf = name.partition(".")
            tree = merge(tree, {section: {leaf: before.value_of(name)}})
    return tree


# --- minutes -----------------------------------------------------------------------------------------------------------


def wish_of(config: RunConfig, prompt_tokens: int) -> Wish:
    """The amount of work that the settings ask for. `prompt_tokens`: length of a usual prompt."""
    return Wish(
        steps=config.train.steps,
        groups=config.staleness.groups_per_step,
        rollouts=math.ceil(config.rollout.played(config.environment.turns)),
        prompts=config.eval.prompts,
        samples=config.eval.samples,
        beside=config.eval.beside,
        max_tokens=config.rollout.max_tokens,
        prompt_tokens=prompt_tokens,
        evaluate_every=config.eval.every,
        save_every=config.checkpoint.every,
        warmup=config.train.warmup_steps,
        least_groups=config.staleness.window,
    )


def fit_minutes(settled: Settled, share: Share, checkpoint: int, prompt_tokens: int) -> Settled:
    """Reduces the plan to what fits into `train.minutes`. `checkpoint`: its size in bytes.

    If a part was not measured, everything is planned, and the first steps show how much fits."""
    config = settled.config
    wish = wish_of(config, prompt_tokens)
    speeds = speeds_of(settled, share, checkpoint)
    if speeds is None:
        unknown = f"{plural(wish.steps, 'step')} are planned; the first of them will show how many fit into {duration(60 * config.train.minutes)}"
        return dataclasses.replace(settled, config=_planned(config, {}, unknown, {"save": checkpoint / SAVING}))
    found = fit(wish, speeds, 60 * config.train.minutes)
    values = {
        "train.steps": found.steps,
        "train.warmup_steps": found.warmup,
        "staleness.groups_per_step": found.groups,
        "eval.prompts": found.prompts,
    }
    expected = f"about {duration(found.seconds)} of {duration(60 * config.train.minutes)}"
    each = f"{found.step_seconds:.3g} s a step and {found.evaluation_seconds:.3g} s an evaluation"
    if config.environment.limits.turns > 1:  # nobody knows how many there will be
        each += ", if a rollout had one turn; the first steps will correct it"
    kept = {"step": found.step_seconds, "evaluation": found.evaluation_seconds, "save": speeds.save}
    notes = () if found.fits else (too_slow(config.train.minutes, found, adapted=bool(config.lora.rank)),)
    config = _planned(config, values, f"{found.of(wish)}: {expected}, {each}{share.words}", kept)
    return dataclasses.replace(settled, config=config, notes=notes)


def _planned(config: RunConfig, values: Mapping[str, Any], message: str, speeds: dict[str, float]) -> RunConfig:
    config = config.with_chosen(values, {"minutes": message})
    return dataclasses.replace(config, chosen=dataclasses.replace(config.chosen, speeds=speeds))


def allowance_of(train: TrainConfig, chosen: ChosenConfig) -> Allowance | None:
    """The time limit of a run with `train.minutes`; None for other runs."""
    if not train.minutes:
        return None
    speeds, wished = chosen.speeds, chosen.wishes.get("train.steps", train.steps)
    return Allowance(
        end=60 * train.minutes,
        steps=train.steps,
        most=max(int(wished), train.steps),
        evaluation=speeds.get("evaluation", 0.0),
        save=speeds.get("save", 0.0),
        step=speeds.get("step", 0.0),
    )


def speeds_of(settled: Settled, share: Share, checkpoint: int) -> Speeds | None:
    """The speeds for planning; None if a part was not measured."""
    config, figures = settled.config, settled.figures
    if config.engine.is_server:
        return None
    rates = {}
    for part, own in (("engine", config.engine), ("trainer", config.train)):
        start = f"{part} {own.dtype} " + ("" if own.path == "auto" else own.path)
        found = [rate for name, rate in figures.tokens.items() if name.startswith(start)]
        if not found:
            return None
        rates[part] = max(found)
    return Speeds(
        sampled=1 / (rates["engine"] * share.cores),
        trained=1 / (rates["trainer"] * share.cores),
        update=UPDATES * figures.update / share.cores,
        start=START / share.of_each,
        save=checkpoint / SAVING,
    )


def too_slow(minutes_set: float, found: Fitted, *, adapted: bool) -> str:
    """The sentence for a machine on which not even the smallest useful run fits."""
    minutes = math.ceil(found.seconds / (1 - SPARE) / 60)
    smaller = "take a smaller model" if adapted else "train an adapter (lora.rank = 16) or take a smaller model"
    least = f"{plural(found.steps, 'step')} of {plural(found.groups, 'group')} with an evaluation before and after"
    return (
        f"train.minutes = {minutes_set:g} is too short for this machine at its current load: {least} would take about {minutes} minutes. The "
        f"run will end in time with fewer steps; {smaller}, set train.minutes = {minutes}, or stop other work on the machine"
    )
