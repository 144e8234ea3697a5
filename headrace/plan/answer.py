"""`headrace plan`: from a config (or a run) and rates to a prediction, and to a recommendation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.config import RunConfig, load_config
from headrace.errors import ConfigError
from headrace.models.resolve import cache_dir
from headrace.plan.rates import hardware
from headrace.plan.rates.rates import Rates, load_rates, save_rates
from headrace.plan.scenario import Scenario
from headrace.plan.sweep import Choice, Split, recommended, sweep, try_out
from headrace.simulate.distributions import Distribution, fixed, parse

Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is asked, as on the command line."""

    config: RunConfig
    run: Path | None = None
    """A run to take rates and lengths from."""
    calibrate: bool = False
    rates: Path | None = None
    """Where measured rates are read from, or written to; none is a file in the cache, by the model's name."""
    hardware: str = ""
    """A chip whose rates are computed; empty for measured ones."""
    model: str = ""
    gpus: int = 0
    trainer_gpus: int = 0
    """0: the share of `gpus` that a sweep finds, or half of them."""
    steps: int = 20
    lengths: str = ""
    """Of completions; empty: as measured."""
    prompts: str = ""
    latency: str = ""
    """Of the reward of one rollout, seconds."""
    workers: int = 0
    solved: float | None = None
    sweep: bool = False


@dataclass(frozen=True)
class Answer:
    choices: tuple[Choice, ...]
    """That of the config first."""
    recommended: Choice | None
    """None where nothing else was tried."""
    notes: tuple[str, ...]
    """What was assumed."""

    @property
    def asked(self) -> Choice:
        return self.choices[0]


def answer(question: Question, say: Say) -> Answer:
    """Raises ConfigError with the remedy where something needed is not known, or cannot be simulated."""
    if question.config.environment.turns > 1:
        raise ConfigError('headrace plan simulates rollouts of one turn: plan with environment.kind = "single_turn"')
    notes: list[str] = []
    rates, contrast = _rates(question, say, notes)
    scenario = _scenario(question, rates, contrast, notes)
    split = _split_of(question, scenario) if question.hardware and question.gpus > 1 else None
    if split:
        notes.append("headrace itself runs on one GPU today (--gpus 1): this is what a run on so many would be like")
        first = split(question.trainer_gpus or question.gpus // 2)
        scenario = first if first else _nearest(split, question)
    if not question.sweep:
        return Answer((try_out(scenario, question.steps),), None, tuple(notes))
    choices = sweep(scenario, None if question.trainer_gpus else split, say)
    return Answer(tuple(choices), recommended(choices), tuple(notes))


def _rates(question: Question, say: Say, notes: list[str]) -> tuple[Rates, float]:
    """And the share of groups that have contrast."""
    if question.hardware:
        return _computed(question), 1.0
    if question.run and not question.calibrate:
        from headrace.plan.rates.from_run import rates_of_run

        return rates_of_run(question.run, question.config)
    path = question.rates or rates_file(question.config)
    if question.calibrate:
        from headrace.plan.rates.calibrate import calibrate

        measured = calibrate(question.config, say)
        save_rates(measured, path)
        say(f"measured rates are in {path}")
        return measured, 1.0
    rates = load_rates(path)
    if (model := Path(question.config.model.path).name) != rates.model:
        notes.append(f"the rates in {path} were measured with {rates.model}, not with {model}")
    return rates, 1.0


def rates_file(config: RunConfig) -> Path:
    return cache_dir() / "rates" / f"{Path(config.model.path).name}.json"


def _computed(question: Question) -> Rates:
    if not question.model:
        raise ConfigError(
            "--hardware computes rates from the size of the model; say it with --model, such as --model 7b"
        )
    chip, shape = hardware.gpu(question.hardware), hardware.shape(question.model)
    if question.gpus == 1 and hardware.fits_one(chip, shape):
        return hardware.shared_rates(chip, shape, question.config.engine.max_running, question.model)
    least = hardware.replica_gpus(chip, shape) + hardware.trainer_gpus(chip, shape)
    if question.gpus < least:
        raise ConfigError(
            f"a {question.model} model whose weights are all trained needs at least {least} GPUs of {question.hardware} "
            f"({hardware.replica_gpus(chip, shape)} to generate, {hardware.trainer_gpus(chip, shape)} to train); raise --gpus, or take a "
            "model that one GPU holds"
        )
    replica = hardware.replica_gpus(chip, shape)
    running = question.config.engine.max_running
    return hardware.rates(
        chip,
        shape,
        replica=replica,
        trainer=hardware.trainer_gpus(chip, shape),
        max_running=running,
        name=question.model,
    )


def _scenario(question: Question, rates: Rates, contrast: float, notes: list[str]) -> Scenario:
    config = question.config
    return Scenario(
        rates=rates,
        completions=_completions(question, rates, notes),
        staleness=config.staleness,
        rollout=config.rollout,
        algo=config.algo,
        partial=config.partial,
        steps=question.steps,
        prompts=parse(question.prompts) if question.prompts else rates.prompts or _assumed_prompts(config, notes),
        latency=parse(question.latency) if question.latency else fixed(0),
        workers=question.workers or config.reward.workers,
        contrast=contrast,
        solved=question.solved,
        recompute=config.engine.swap == "recompute",
        identity_every=config.watch.identity_every,
        seed=config.seed,
    )


def _completions(question: Question, rates: Rates, notes: list[str]) -> Distribution:
    if question.lengths:
        return parse(question.lengths)
    if rates.completions:
        return rates.completions
    mean = question.config.rollout.max_tokens / 3
    notes.append(
        f"completions are assumed to be log-normal with a mean of a third of rollout.max_tokens ({mean:.0f}) and sigma 0.8; say "
        "better with --lengths lognormal:mean=...,sigma=..."
    )
    return Distribution("lognormal", mean=mean, sigma=0.8)


def _assumed_prompts(config: RunConfig, notes: list[str]) -> Distribution:
    notes.append("prompts are assumed to have 200 tokens; say better with --prompts")
    return fixed(200)


def _split_of(question: Question, scenario: Scenario) -> Split:
    """Pools of `question.gpus`: the trainer's share, and as many replicas as the rest holds."""
    chip, shape = hardware.gpu(question.hardware), hardware.shape(question.model)
    replica = hardware.replica_gpus(chip, shape)
    running = question.config.engine.max_running

    def split(trainer: int) -> Scenario | None:
        replicas = (question.gpus - trainer) // replica
        if replicas < 1 or trainer < hardware.trainer_gpus(chip, shape):
            return None
        trainer = question.gpus - replicas * replica  # what is left over trains
        rates = hardware.rates(chip, shape, replica=replica, trainer=trainer, max_running=running, name=question.model)
        return dataclasses.replace(scenario, rates=rates, replicas=replicas)

    return split


def _nearest(split: Split, question: Question) -> Scenario:
    if question.trainer_gpus:
        raise ConfigError(
            f"--trainer-gpus {question.trainer_gpus} of --gpus {question.gpus} leaves one of the pools too small for a "
            f"{question.model} model; choose another, or leave it out"
        )
    found = [one for trainer in range(1, question.gpus) if (one := split(trainer))]
    return min(found, key=lambda one: abs(one.rates.trainer.gpus - question.gpus / 2))


def config_for(source: str, run: Path | None, sets: list[str]) -> RunConfig:
    from headrace.config import config_of_run, read_config

    if run:
        return read_config(config_of_run(run), sets)
    return load_config(source, sets)
