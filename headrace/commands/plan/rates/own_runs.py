"""Rates that headrace itself has measured on GPUs: of a card and a size of model, with the date of the run, instead of those of a data sheet.

`own_runs.json` is made of the results of the queue for machines with a GPU (`benchmarks/device/results`, `make docs`). A run speaks for its card, and for
models of about its size: for those, what a pass or a token took beside the hardware's own time is taken as measured, and the latter is computed. Other
sizes have the rates of a data sheet, and the plan says how far from one the nearest run was.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib.resources import files

import msgspec

from headrace.commands.plan.rates import hardware
from headrace.commands.plan.rates.hardware import GPUS, PASSES, Gpu
from headrace.commands.plan.rates.rates import EngineRates, Rates, TrainerRates
from headrace.commands.plan.rates.shapes import SHAPES, Architecture

ALIKE = 3.0
"""A run speaks for models of up to so many times, and down to so small a part of, its parameters. A choice: small kernels and launches, which made up most
of what was measured, weigh less in a larger model."""


class OwnRun(msgspec.Struct, frozen=True):
    card: str
    """A key of `GPUS`."""
    model: str
    """A key of `SHAPES`."""
    date: str
    commit: str
    passes: tuple[tuple[int, float, float], ...]
    """(sequences, tokens in the cache of each, seconds)"""
    steps: tuple[tuple[int, float], ...]
    """(tokens forwarded, seconds)"""

    @property
    def words(self) -> str:
        return f"{self.model}, {self.date}, commit {self.commit}"


@cache
def own_runs() -> tuple[OwnRun, ...]:
    """Returns all runs, the oldest first."""
    text = files("headrace.commands.plan.rates").joinpath("own_runs.json").read_bytes()
    return tuple(msgspec.json.decode(text, type=tuple[OwnRun, ...]))


@dataclasses.dataclass(frozen=True)
class Known:
    """The newest runs of a card that speak for a model: of the engine and of the trainer. None where there is none."""

    engine: OwnRun | None
    trainer: OwnRun | None

    @property
    def all(self) -> bool:
        return bool(self.engine and self.trainer)


def known(chip: Gpu, model: Architecture) -> Known:
    mine = [run for run in own_runs() if GPUS[run.card] == chip and _alike(SHAPES[run.model], model)]
    mine.sort(key=lambda run: (-_factor(SHAPES[run.model], model), run.date))
    return Known(
        next((run for run in reversed(mine) if run.passes), None),
        next((run for run in reversed(mine) if run.steps), None),
    )


def _factor(one: Architecture, other: Architecture) -> float:
    """How many times the larger of two models has the parameters of the smaller."""
    return max(one.parameters, other.parameters) / min(one.parameters, other.parameters)


def _alike(one: Architecture, other: Architecture) -> bool:
    return bool(one.experts) == bool(other.experts) and _factor(one, other) <= ALIKE


def with_own_runs(rates: Rates, chip: Gpu, model: Architecture, passes: float = PASSES) -> Rates:
    """Returns `rates`, computed from a data sheet, with what was measured in place of it: of an engine and of a trainer on one GPU. `passes`: forward
    passes that a trained token costs. The source says which rates are whose."""
    found, sources = known(chip, model), []
    engine, trainer = rates.engine, rates.trainer
    if found.engine and engine.gpus == 1:
        engine = _engine(engine, found.engine, chip, model)
        sources.append(f"passes of headrace's own run ({found.engine.words})")
    if found.trainer and trainer.gpus <= 1:
        trainer = _trainer(trainer, found.trainer, model, passes)
        sources.append(f"steps of headrace's own run ({found.trainer.words})")
    if not sources:
        return msgspec.structs.replace(rates, source=f"of a data sheet: {rates.source}")
    rest = (
        "all else"
        if len(sources) == 2
        else "all else, the " + ("trainer" if found.engine and engine.gpus == 1 else "engine") + " too,"
    )
    source = f"{' and '.join(sources)} on one {chip.name}; {rest} of a data sheet: {rates.source}"
    return msgspec.structs.replace(rates, engine=engine, trainer=trainer, source=source)


def _engine(computed: EngineRates, run: OwnRun, chip: Gpu, model: Architecture) -> EngineRates:
    """The data sheet's passes, longer by what those of the run took beside theirs: a pass at a number of sequences between two measured ones is
    interpolated."""
    own = hardware.engine_rates(chip, SHAPES[run.model], 1, computed.max_running)
    cached = {count: own.context * count * context for count, context, _ in run.passes}
    points = [
        (float(count), computed.pass_seconds(count) + seconds - cached[count] - own.pass_seconds(count))
        for count, _, seconds in sorted(run.passes)
    ]
    return msgspec.structs.replace(computed, decode=tuple(points))


def _trainer(computed: TrainerRates, run: OwnRun, model: Architecture, passes: float) -> TrainerRates:
    """A token as it was in the longest step of the run, by the parameters and the passes of this model; the optimizer's part is the data sheet's, and small."""
    tokens, seconds = max(run.steps)
    token = seconds / tokens * model.active / SHAPES[run.model].active * passes / PASSES
    return msgspec.structs.replace(computed, token=token, step=computed.step - hardware.BESIDE_STEP)


def how_far(chip: Gpu, model: Architecture) -> str:
    """Returns a sentence on how headrace's own runs on this card compare with its data sheet, for a model for which none speaks; empty if one does, or
    if there is none."""
    found, mine = known(chip, model), [run for run in own_runs() if GPUS[run.card] == chip]
    if not mine or found.all:
        return ""
    told: dict[str, list[str]] = {}
    for run in mine:
        shape, parts = SHAPES[run.model], told.setdefault(run.words, [])
        if run.passes and not found.engine:
            count, context, seconds = max(run.passes)
            sheet_pass = count / hardware.engine_rates(chip, shape, 1, count).tokens_per_second(count, context)
            parts.append(f"a pass of {count:,} sequences took {seconds / sheet_pass:.1f} times as long")
        if run.steps and not found.trainer:
            tokens, seconds = max(run.steps)
            sheet = hardware.trainer_rates(chip, shape, 1)
            parts.append(f"a step took {seconds / (sheet.step + sheet.token * tokens):.1f} times as long")
    words = "; ".join(f"{' and '.join(parts)} ({where})" for where, parts in told.items() if parts)
    return f"headrace was not measured on {chip.name} with a model of this size; with another, compared with its data sheet, {words}"
