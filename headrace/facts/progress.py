"""The progress of a run for Python: small values for callbacks while it goes on, and the same as columns when it is over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.facts import facts
from headrace.facts.records import StepRow


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step. Means are over the tokens or the completions that it trained."""

    run: str
    """Name of the run, or of the adapter if several are trained."""
    step: int
    """Counted from 1."""
    seconds: float
    """Time of its end, since the start of the run."""
    reward: float
    """Mean over all rollouts that ended since the step before, trained or not. It measures the policy."""
    reward_trained: float
    """Mean over the rollouts that this step trained; groups without contrast are not among them."""
    reward_std: float
    rewards: dict[str, float]
    """Mean of each reward by the name of its function, over the completions that it applies to."""
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    """Nats."""
    kl: float
    """k3 estimate of KL(sampler || trainer), nats."""
    clip_fraction: float
    lag_mean: float
    """Optimizer steps between the sampling of a token and its training."""
    lag_max: int
    length_mean: float
    """Mean tokens of a completion."""
    truncated: float
    """Share of the completions that ended at `rollout.max_tokens`."""
    tokens: int
    """Tokens in the loss."""
    step_seconds: float
    wait_seconds: float
    """Seconds that the trainer waited for the batch."""

    @classmethod
    def of(cls, row: StepRow, run: str) -> Step:
        report, tokens, count = row.report, sum(row.lags.values()), len(row.lengths)
        return cls(
            run=run,
            step=report.version,
            seconds=row.t,
            reward=row.reward_drawn,
            reward_trained=row.reward_mean,
            reward_std=row.reward_std,
            rewards=dict(row.components),
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.lr,
            entropy=report.entropy,
            kl=report.kl,
            clip_fraction=report.clip_fraction,
            lag_mean=sum(lag * n for lag, n in row.lags.items()) / tokens if tokens else math.nan,
            lag_max=max(row.lags, default=0),
            length_mean=sum(row.lengths) / count if count else math.nan,
            truncated=row.truncated / count if count else math.nan,
            tokens=report.loss_tokens,
            step_seconds=report.seconds,
            wait_seconds=row.wait_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The held-out reward at one step."""

    run: str
    step: int
    phase: str
    """`before`, `during` or `after` training."""
    seconds: float
    """Time since the start of the run."""
    reward: float
    error: float
    """Standard error of `reward`."""
    prompts: int
    """Prompts over which `reward` is the mean; prompts none of whose rollouts could be scored are not among them."""
    length_mean: float
    failed: int
    """Rollouts that failed. They are not in the mean, rather than scored as 0."""
    name: str = ""
    """The set (`eval.sets`); empty for the held-out prompts, unless `eval.name` names them."""

    @classmethod
    def of(cls, fact: facts.Evaluated, run: str) -> Evaluation:
        return cls(
            run=run,
            step=fact.step,
            phase=fact.phase,
            seconds=fact.t,
            reward=fact.reward_mean,
            error=fact.reward_sem,
            prompts=fact.prompts,
            length_mean=fact.length_mean,
            failed=sum(fact.failures.values()),
            name=fact.name,
        )


def history(rows: Iterable[StepRow]) -> dict[str, list[Any]]:
    return columns([Step.of(row, "") for row in rows])


def held_out(evals: Iterable[facts.Evaluated]) -> dict[str, list[Any]]:
    return columns([Evaluation.of(fact, "") for fact in evals])


def columns(values: Sequence[Step] | Sequence[Evaluation]) -> dict[str, list[Any]]:
    """Returns a column for each field, and for `rewards` one per function: `rewards.exact`. NaN where a step has no such value."""
    rows = [_flat(entry) for entry in values]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def _flat(value: Step | Evaluation) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if isinstance(given, dict):
            row |= {f"{field.name}.{name}": mean for name, mean in given.items()}
        elif field.name != "run":
            row[field.name] = given
    return row
