"""Whether alternation pays: that engine and trainer take turns on the same devices (`orchestration.placement = "shared"`), and that the trainer
lends its own while it waits (`orchestration.lend`).

The same pipeline is simulated with an engine that stands still while the trainer works. On GPUs both then have all of them, instead of a
part each; on a CPU both have all cores in either case, and what is gained is memory. Lending is simulated with engines on all GPUs, which
go at the pace of those that are left to them while the trainer works.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec

from headrace.algo.config import AlgoConfig
from headrace.commands.plan.measure import Prediction, Scenario
from headrace.commands.plan.rates import hardware
from headrace.commands.plan.rates.rates import BFLOAT16, Rates
from headrace.commands.plan.rates.shapes import Architecture
from headrace.commands.plan.sweep import try_out
from headrace.facts.texts import short_time
from headrace.trainer.config import TrainConfig

HOST_LINK = 25e9
"""Bytes per second between a GPU and the memory of its host: PCIe 4.0 x16 (32 GB/s), used to four fifths (an assumption)."""
MOVED = 12
"""Bytes per parameter that leave a GPU with the trainer, and come back: weights and AdamW's state in float32."""
STANDS = 1e9
"""Factor by which the engine takes longer while the trainer works."""


class Alternation(NamedTuple):
    """The prediction for shared devices, beside that for what the config asks for."""

    seconds_per_step: float
    change: float | None
    """Seconds of a step in which the devices change hands, there and back; None if nothing is known of it."""
    busy: tuple[float, float]
    """Seconds of a step in which an engine, and the trainer, work if each has its own devices."""
    apart: float
    """Seconds per step then."""

    @property
    def words(self) -> str:
        cost = (
            "what sleep and wake take not counted"
            if self.change is None
            else f"{short_time(self.change)} of it sleep and wake"
        )
        generates, trains = (short_time(seconds) for seconds in self.busy)
        share = self.seconds_per_step / self.apart
        pays = (
            "pays"
            if share < 0.98
            else "costs no time, and saves memory"
            if share < 1.02
            else "pays only where memory is short"
        )
        return (
            f'taking turns on the same devices (orchestration.placement = "shared"): {short_time(self.seconds_per_step)} a step, {cost}, {share:.2f} times the '
            f"{short_time(self.apart)} of both at once (generation {generates}, training {trains}): it {pays}"
        )


def alternating(
    scenario: Scenario,
    own: Prediction,
    train: TrainConfig,
    algo: AlgoConfig,
    *,
    chip: hardware.Gpu | None,
    model: Architecture | None,
    change: float | None,
    steps: int,
) -> Alternation:
    """Simulates the scenario again, with turns. `chip` and `model`: of computed rates; `change`: measured seconds of two changes, if there
    are any; `steps`: as for `try_out`."""
    gpus, rates, replicas = scenario.gpus, scenario.rates, scenario.replicas
    if chip and model:
        change = (2 * MOVED + BFLOAT16) * model.parameters / (gpus * HOST_LINK)
        if rates.trainer.gpus:
            rates, replicas = (
                _with_all(rates, chip, model, hardware.passes_of(train, algo, model), gpus=gpus, train=train),
                gpus // rates.engine.gpus,
            )
    trainer = msgspec.structs.replace(rates.trainer, step=rates.trainer.step + (change or 0.0))
    stands = msgspec.structs.replace(rates, engine_slowed=STANDS, trainer_slowed=1.0, trainer=trainer)
    shared = try_out(dataclasses.replace(scenario, rates=stands, replicas=replicas), steps)
    apart = own.seconds_per_step
    busy = (1 - own.engine_idle) * apart, (1 - own.trainer_idle) * apart
    return Alternation(shared.prediction.seconds_per_step, change, busy, apart)


class Lending(NamedTuple):
    """The prediction for a trainer whose GPUs generate while it waits (`orchestration.lend`)."""

    seconds_per_step: float
    idle: float
    """Share of the time in which the trainer waits without lending."""
    apart: float
    gpus: int
    """GPUs of the trainer."""

    @property
    def words(self) -> str:
        share = self.seconds_per_step / self.apart
        how = "" if self.gpus == 1 else " does that for a trainer in one process so far"
        pays = "it pays" if share < 0.95 else "it hardly pays"
        return (
            f"lending the trainer's GPUs to generation while it waits ({self.idle:.0%} of the time; orchestration.lend{how}): at best "
            f"{short_time(self.seconds_per_step)} a step, {share:.2f} times as long: {pays}"
        )


def lending(
    scenario: Scenario, own: Prediction, *, chip: hardware.Gpu | None, model: Architecture | None, steps: int
) -> Lending | None:
    """Simulates the scenario again, with engines on all GPUs. None where the trainer has none of its own, as on a CPU, whose cores the
    engine has anyway.

    While the trainer works, the sequences of all engines are on those that are left: a pass takes as long as one of so many more sequences. At
    best, because sequences do not move between engines; the GPUs change hands as in turns, twice a step."""
    rates, replicas = scenario.rates, scenario.gpus // scenario.rates.engine.gpus
    if not (chip and model and rates.trainer.gpus) or replicas <= scenario.replicas:
        return None
    engine, more = rates.engine, replicas / scenario.replicas
    read = engine.context * (scenario.prompts.mean_below(float("inf")) + scenario.mean_completion / 2)
    few, many = (engine.pass_seconds(n) + read * n for n in (own.running / more, own.running))
    change = (2 * MOVED + BFLOAT16) * model.parameters / (rates.trainer.gpus * HOST_LINK)
    lent = msgspec.structs.replace(
        rates,
        engine_slowed=rates.engine_slowed * many / few,
        trainer=msgspec.structs.replace(rates.trainer, step=rates.trainer.step + change),
    )
    with_more = try_out(dataclasses.replace(scenario, rates=lent, replicas=replicas), steps)
    return Lending(with_more.prediction.seconds_per_step, own.trainer_idle, own.seconds_per_step, rates.trainer.gpus)


def _with_all(
    rates: Rates, chip: hardware.Gpu, model: Architecture, passes: float, *, gpus: int, train: TrainConfig
) -> Rates:
    """The rates of a trainer that has all GPUs."""
    context = train.parallel.context
    trainer = hardware.trainer_rates(
        chip, model, gpus - gpus % context, train.microbatch, context=context, passes=passes
    )
    return msgspec.structs.replace(rates, trainer=trainer)
