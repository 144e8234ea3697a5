"""What a run leaves to us, settled before it starts: dtype, kernels or PyTorch, threads; and what fits into `train.minutes`.

The settings that come of it are the run's, and stand in its `config.toml` beside what was asked for (`RunConfig.chosen`): a resume and
a replay read them there and choose nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.auto.allowance import Allowance
from headrace.auto.candidates import Figures, PartChoice, candidates, choose, choose_threads
from headrace.auto.fit import SPARE, Fitted, Speeds, Wish, fit
from headrace.auto.measurer import Measurer, thread_counts
from headrace.auto.share import Share
from headrace.config import RunConfig, config_of_run, read_config, read_tree
from headrace.observe.text import duration, plural
from headrace.rehearsal.machine import Machine
from headrace.settings.other_names import meaning
from headrace.settings.toml import Tree, build, merge

WIDE = 28
"""Bytes a parameter of a run whose engine serves float32: the trainer's 16, published twice, and packed in the engine."""
SAVING = 200e6
"""Bytes a second that a checkpoint is written with where nobody has measured it; a slow disk, or one that others use."""
UPDATES = 2
"""Times the optimizer's update that a step takes beside its tokens: packing and publishing move as many bytes."""
START = 20.0
"""Seconds from the command to the first sampled token where nobody has measured it: two processes import torch and load."""


@dataclasses.dataclass(frozen=True)
class Settled:
    config: RunConfig
    notes: tuple[str, ...] = ()
    figures: Figures = Figures()


def settle(config: RunConfig, model_dir: Path, machine: Machine, parameters: int, measurer: Measurer) -> Settled:
    """Chooses what the settings leave open. Settings that say something are left alone; on a GPU all of them are."""
    on_cpu = {
        "engine": not config.engine.is_server and machine.device("engine.device", config.engine.device) == "cpu",
        "train": machine.device("train.device", config.train.device) == "cpu",
    }
    asked = [own for part, own in (("engine", config.engine), ("train", config.train)) if on_cpu[part]]
    if not config.train.minutes and not any("auto" in (own.dtype, own.path) for own in asked):
        return Settled(config)
    counts = thread_counts(machine.cores)
    figures = measurer.measure(json.loads((model_dir / "config.json").read_text(encoding="utf-8")), counts)
    if figures.problem:
        return Settled(config, figures=figures)
    wide = WIDE * parameters + config.engine.kv_gib * 2**30 <= machine.available
    allowed, threads = candidates(config.engine, config.train, wide), choose_threads(counts, figures)
    if on_cpu["engine"]:
        config = _taken(config, choose("engine", config.engine, allowed, figures, threads))
    if on_cpu["train"]:
        config = _taken(config, choose("trainer", config.train, allowed, figures, threads))
    return Settled(config, figures=figures)


def _taken(config: RunConfig, choice: PartChoice) -> RunConfig:
    section = "engine" if choice.part == "engine" else "train"
    values: dict[str, Any] = {"dtype": choice.dtype, "path": choice.path}
    values |= {"threads": choice.threads} if choice.threads else {}
    chosen = {f"{section}.{name}": value for name, value in values.items()}
    return with_chosen(config, chosen, {f"{choice.part} chosen": choice.why})


def with_chosen(config: RunConfig, values: Mapping[str, Any], why: Mapping[str, str]) -> RunConfig:
    """The settings with others, and with what they were. `values`: by the setting's dotted name."""
    wishes = {name: setting(config, name) for name, value in values.items() if setting(config, name) != value}
    for name in wishes:
        section, _, leaf = name.partition(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{leaf: values[name]})}
        )
    known = config.chosen
    chosen = dataclasses.replace(known, wishes={**wishes, **known.wishes}, why={**known.why, **why})
    return dataclasses.replace(config, chosen=chosen)


def setting(config: RunConfig, name: str) -> Any:
    """`train.steps` of a config."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def resumed_settings(source: RunConfig | Mapping[str, Any] | str | Path, run_dir: Path) -> Tree:
    """A config for a run that goes on: settings which it leaves as they had been left are those that the run has chosen."""
    tree = read_tree(source)
    config, before = build(RunConfig, tree, meaning), read_config(config_of_run(run_dir))
    tree = {**tree, "chosen": dataclasses.asdict(before.chosen)}
    for name, wish in before.chosen.wishes.items():
        if setting(config, name) == wish:
            section, _, leaf = name.partition(".")
            tree = merge(tree, {section: {leaf: setting(before, name)}})
    return tree


# --- minutes -----------------------------------------------------------------------------------------------------------


def wish_of(config: RunConfig, prompt_tokens: int) -> Wish:
    """`prompt_tokens`: of a usual prompt."""
    return Wish(
        steps=config.train.steps,
        groups=config.staleness.groups_per_step,
        rollouts=config.rollout.group_size,
        prompts=config.eval.prompts,
        samples=config.eval.samples,
        max_tokens=config.rollout.max_tokens,
        prompt_tokens=prompt_tokens,
        evaluate_every=config.eval.every,
        save_every=config.checkpoint.every,
        warmup=config.train.warmup_steps,
        least_groups=config.staleness.window,
    )


def fit_minutes(settled: Settled, share: Share, checkpoint: int, prompt_tokens: int) -> Settled:
    """What fits into `train.minutes`. `checkpoint`: bytes of one.

    Where a part was not measured everything is planned, and the first steps tell what fits."""
    config = settled.config
    wish = wish_of(config, prompt_tokens)
    speeds = speeds_of(settled, share, checkpoint)
    if speeds is None:
        unknown = f"{plural(wish.steps, 'step')} are planned; how many fit into {duration(60 * config.train.minutes)} the first of them show"
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
    kept = {"step": found.step_seconds, "evaluation": found.evaluation_seconds, "save": speeds.save}
    notes = () if found.fits else (too_slow(config, found),)
    config = _planned(config, values, f"{found.of(wish)}: {expected}, {each}{share.words}", kept)
    return dataclasses.replace(settled, config=config, notes=notes)


def _planned(config: RunConfig, values: Mapping[str, Any], said: str, speeds: dict[str, float]) -> RunConfig:
    config = with_chosen(config, values, {"minutes": said})
    return dataclasses.replace(config, chosen=dataclasses.replace(config.chosen, speeds=speeds))


def allowance_of(config: RunConfig) -> Allowance | None:
    """Of a run with `train.minutes`; None of others."""
    if not config.train.minutes:
        return None
    speeds, wished = config.chosen.speeds, config.chosen.wishes.get("train.steps", config.train.steps)
    return Allowance(
        end=60 * config.train.minutes,
        steps=config.train.steps,
        most=max(int(wished), config.train.steps),
        evaluation=speeds.get("evaluation", 0.0),
        save=speeds.get("save", 0.0),
        step=speeds.get("step", 0.0),
    )


def speeds_of(settled: Settled, share: Share, checkpoint: int) -> Speeds | None:
    """None where a part was not measured."""
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


def too_slow(config: RunConfig, found: Fitted) -> str:
    """For a machine on which not even the least of which one can learn something fits."""
    minutes = math.ceil(found.seconds / (1 - SPARE) / 60)
    smaller = (
        "take a smaller model" if config.lora.rank else "train an adapter (lora.rank = 16) or take a smaller model"
    )
    least = f"{plural(found.steps, 'step')} of {plural(found.groups, 'group')} with an evaluation before and after"
    return (
        f"train.minutes = {config.train.minutes:g} is too little for this machine as it is now: {least} would take about {minutes} minutes. The "
        f"run ends in time with what it has learned by then; {smaller}, set train.minutes = {minutes}, or leave the machine to the run"
    )
