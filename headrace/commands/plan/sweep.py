"""Finds the settings that are worth their lag: tries splits of the pools and depths, and recommends one setting. In words, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.commands.plan.measure import Prediction, Scenario, margins, predict
from headrace.loop.staleness import StalenessConfig

LAGS = (0, 1, 2, 4)
SPLITS = 7
"""Splits of the pools that are tried, evenly spaced; then the neighbours of the best one."""
GOOD_ENOUGH = 0.98
"""The share of the best throughput that suffices. Of the settings that reach it, the one with the least lag and then the strictest
order is preferred."""
STEPS = 12
"""Steps that are counted of every setting tried."""

Split = Callable[[int], Scenario | None]
"""Returns the scenario with that many GPUs in the trainer; None if that split is impossible."""


@dataclass(frozen=True)
class Option:
    """A setting that was tried, and its prediction."""

    scenario: Scenario
    prediction: Prediction

    @property
    def name(self) -> str:
        staleness, rates = self.scenario.staleness, self.scenario.rates
        parts = [
            f"max_lag {staleness.max_lag}",
            f"window {staleness.window}",
            f"max_running {rates.engine.max_running}",
        ]
        if self.scenario.gpus > 2:
            parts.append(f"{self.scenario.replicas * rates.engine.gpus} + {rates.trainer.gpus} GPUs")
        return ", ".join(parts)


def try_out(scenario: Scenario, steps: int = STEPS) -> Option:
    """Simulates a scenario. `steps`: steps that are counted at least, beside those in which the pipeline fills and empties.

    With paced generation, slots become free together and batches come in bursts of max_lag + 1, so whole bursts are counted."""
    burst = scenario.staleness.max_lag + 1
    steps = -(-steps // burst) * burst
    whole = dataclasses.replace(scenario, steps=steps + sum(margins(scenario)))
    return Option(whole, predict(whole))


class Sweep:
    """The settings that were tried, each simulated once."""

    def __init__(self, scenario: Scenario, say: Callable[[str], None]) -> None:
        self.tried: list[Option] = []
        self._say = say
        self.explore([scenario])

    def explore(self, scenarios: Iterable[Scenario | None]) -> None:
        known = {_identity(choice.scenario) for choice in self.tried}
        for scenario in scenarios:
            if scenario is None or _identity(scenario) in known:
                continue
            known.add(_identity(scenario))
            self.tried.append(choice := try_out(scenario))
            self._say(f"{choice.name}: {choice.prediction.tokens_per_second:,.0f} tokens/s")


def sweep(scenario: Scenario, split: Split | None, say: Callable[[str], None]) -> list[Option]:
    """Returns all options that were tried: the scenario itself, then other splits of its pools (if `split` is given), then depths at the
    best split, then splits at the best depth, then batch sizes."""
    found = Sweep(scenario, say)
    if split:
        found.explore(splits(split, scenario.gpus, scenario.staleness))
    found.explore(deeper(fastest(found.tried).scenario))
    if split:
        best = recommended(found.tried).scenario
        found.explore(splits(split, scenario.gpus, best.staleness))
        own = fastest(found.tried).scenario.rates.trainer.gpus
        apart = max(1, scenario.gpus // (SPLITS + 1) // 2)
        near = (split(gpus) for gpus in (own - apart, own + apart))
        found.explore(candidate and dataclasses.replace(candidate, staleness=best.staleness) for candidate in near)
    found.explore(wider(recommended(found.tried).scenario))
    return found.tried


def splits(split: Split, total: int, staleness: StalenessConfig) -> Iterable[Scenario]:
    apart = max(1, total // (SPLITS + 1))
    for trainer in range(apart, total, apart):
        if scenario := split(trainer):
            yield dataclasses.replace(scenario, staleness=staleness)


def _identity(scenario: Scenario) -> tuple[object, ...]:
    """Returns the settings that a sweep changes."""
    rates = scenario.rates
    return scenario.staleness, scenario.replicas, rates.trainer.gpus, rates.engine.max_running


def deeper(scenario: Scenario) -> Iterable[Scenario]:
    """Yields every depth, in strict order and with a window of half its possible size."""
    if not scenario.staleness.paced:
        return
    for lag in LAGS:
        groups = scenario.staleness.groups_per_step
        for window in sorted({1, lag * groups // 2 + 1}):
            staleness = dataclasses.replace(scenario.staleness, max_lag=lag, window=window)
            yield dataclasses.replace(scenario, staleness=staleness)


def wider(scenario: Scenario) -> Iterable[Scenario]:
    """Yields half and twice the sequences at once in an engine, as far as its batch curve was measured."""
    engine = scenario.rates.engine
    for running in (engine.max_running // 2, engine.max_running * 2):
        if 0 < running <= engine.decode[-1][0]:
            narrowed = msgspec.structs.replace(engine, max_running=running)
            yield dataclasses.replace(scenario, rates=msgspec.structs.replace(scenario.rates, engine=narrowed))


def fastest(choices: Sequence[Option]) -> Option:
    return max(choices, key=lambda choice: choice.prediction.tokens_per_second)


def recommended(choices: Sequence[Option]) -> Option:
    """Returns, among the options nearly as fast as the fastest, the one with the least lag, then with the strictest order."""
    best = fastest(choices).prediction.tokens_per_second
    good = [choice for choice in choices if choice.prediction.tokens_per_second >= GOOD_ENOUGH * best]
    return min(good, key=lambda choice: (choice.scenario.staleness.max_lag, choice.scenario.staleness.window))


# --- Sentences about a prediction -------------------------------------------------------------------------------------


BUSY = 0.1
"""Idle share below which a pool counts as the bottleneck."""
BIASED = 0.02
"""Relative difference of lengths from which a bias is reported."""


def bottleneck(prediction: Prediction) -> str:
    engine, trainer = prediction.engine_idle, prediction.trainer_idle
    if trainer < BUSY and engine < BUSY:
        return f"both pools are busy (engine idle {engine:.0%}, trainer idle {trainer:.0%})"
    if trainer <= engine and trainer < BUSY:
        return f"the trainer is the bottleneck (idle {trainer:.0%}); the engine is idle {engine:.0%} of the time"
    if engine < BUSY:
        return f"generation is the bottleneck (engine idle {engine:.0%}); the trainer is idle {trainer:.0%} of the time"
    return f"each pool waits for the other (engine idle {engine:.0%}, trainer idle {trainer:.0%})"


def bias(prediction: Prediction) -> str:
    """Returns a sentence about the bias of lengths; empty if trained completions are as long as drawn ones."""
    share = prediction.trained_length / prediction.drawn_length if prediction.drawn_length else 1.0
    if abs(share - 1) < BIASED:
        return ""
    word = "shorter" if share < 1 else "longer"
    return f"trained completions are {abs(share - 1):.0%} {word} than drawn ones: these settings are biased"


def recommendation(choice: Option, choices: Sequence[Option]) -> str:
    """Returns why this option is recommended, compared with the fastest one and with the synchronous one of its split."""
    best, own = fastest(choices), choice.prediction
    message = f"{choice.name}: {own.tokens_per_second:,.0f} tokens/s"
    synchronous = [
        option for option in choices if _same_pools(option.scenario, choice.scenario) and _is_synchronous(option)
    ]
    if synchronous and not _is_synchronous(choice):
        gain = own.tokens_per_second / max(option.prediction.tokens_per_second for option in synchronous)
        message += f", {gain:.2f} times the synchronous run's"
    if best is not choice:
        share = own.tokens_per_second / best.prediction.tokens_per_second
        message += f", {share:.1%} of the fastest setting's ({best.name})"
    return f"{message}; {bottleneck(own)}"


def _is_synchronous(choice: Option) -> bool:
    return choice.scenario.staleness.max_lag == 0


def _same_pools(a: Scenario, b: Scenario) -> bool:
    return (a.replicas, a.rates.trainer.gpus) == (b.replicas, b.rates.trainer.gpus)
