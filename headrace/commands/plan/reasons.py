"""Sentences about a prediction."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.commands.plan.measure import Prediction
from headrace.commands.plan.scenario import Scenario
from headrace.commands.plan.sweep import Option, fastest

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
