"""The numbers that dashboards show: the same names in all of them, and one value per optimizer step."""

from __future__ import annotations

import math

from headrace.facts.costs import Costs
from headrace.facts.facts import Evaluated, IdentityChecked, WeightsLive
from headrace.facts.numbers.choices import Choices
from headrace.facts.numbers.engine_use import EngineUse
from headrace.facts.numbers.shares import Tally
from headrace.facts.numbers.state import RunState
from headrace.facts.records import MetricsFact, StepRow


def scalars(fact: MetricsFact, state: RunState) -> tuple[int, dict[str, float]]:
    """Returns the step that a fact belongs to, and its finite numbers; none for facts without numbers."""
    match fact:
        case StepRow():
            step, values = fact.report.version, _step_scalars(fact, state.engine) | _share_scalars(state.shares.recent)
            values |= _choice_scalars(state.choices) | _cost_scalars(state.costs, fact.report.loss_tokens)
        case Evaluated():
            values = {"held_out/reward": fact.reward_mean, "held_out/length": fact.length_mean}
            values |= {"held_out/failed_prompts": float(fact.failed_prompts)} if fact.asked else {}
            step = fact.step
        case WeightsLive():
            step = fact.update.version
            values = {"sync/publish_seconds": fact.update.seconds, "sync/swap_seconds": fact.load.swap_seconds}
            values |= {"sync/pause_seconds": fact.pause, "sync/interrupted": float(fact.interrupted)}
        case IdentityChecked():
            step, values = fact.version, {"identity/mean_abs_diff": fact.mean_abs_diff}
        case _:
            return 0, {}
    return step, {name: value for name, value in values.items() if math.isfinite(value)}


def _step_scalars(row: StepRow, engine: EngineUse) -> dict[str, float]:
    report = row.report
    names = ("loss", "grad_norm", "lr", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "kl")
    values = {f"train/{name}": float(getattr(report, name)) for name in names}
    extras = (
        "pairs",
        "pairs_agreed",
        "pair_margin",
        "reference_kl",
        "teacher_kl",
        "outside_tokens",
        "missing_routes",
        "routing_conflicts",
        "dropped_tokens",
    )
    values |= {f"train/{name}": float(value) for name in extras if (value := getattr(report, name))}
    for one in report.lags:
        numbers = {"kl": one.kl, "ratio": one.ratio, "ess": one.ess, "clipped": one.clipped, **one.gaps}
        values |= {f"by_lag_{one.name}/{name}": value for name, value in numbers.items()}
        values |= {f"by_lag_{one.name}/masked_{rule}": share for rule, share in one.masked.items()}
    values |= {"reward/drawn": row.reward_drawn, "reward/trained": row.reward_mean, "reward/std": row.reward_std}
    values |= {f"reward/{name}": mean for name, mean in row.components.items()}
    tokens = sum(row.lags.values())
    if tokens:
        values["lag/mean"] = sum(lag * count for lag, count in row.lags.items()) / tokens
        values["lag/max"] = float(max(row.lags))
        values["lag/min"] = float(min(row.lags))
    if row.lengths:
        values["length/mean"] = sum(row.lengths) / len(row.lengths)
        values["length/truncated_share"] = row.truncated / len(row.lengths)
        values["lag/rollouts_swapped"] = row.swapped / len(row.lengths)
    values |= {name: float(count) for name, count in _uncommon(row).items() if count}
    values |= {"time/step_seconds": report.seconds, "time/wait_seconds": row.wait_seconds}
    if report.seconds:
        values["time/train_tokens_per_second"] = report.loss_tokens / report.seconds
    idle, rate = engine.recent()
    if idle is not None and rate is not None:
        values |= {"time/engine_idle": idle, "time/engine_tokens_per_second": rate}
    return values


def _share_scalars(recent: Tally) -> dict[str, float]:
    """Returns shares over the last groups."""
    found = {
        "share/truncated": recent.truncated_share,
        "share/no_contrast": recent.no_contrast_share,
        "share/dropped": recent.dropped_share,
        "share/failed": recent.failed_share,
    }
    return {name: share for name, share in found.items() if share is not None}


def _choice_scalars(choices: Choices) -> dict[str, float]:
    """Returns the bias of a curriculum over the whole run."""
    found = {"prompts/distance": choices.distance, "prompts/effective": choices.effective}
    return {name: value for name, value in found.items() if value is not None}


def _cost_scalars(costs: Costs, tokens: int) -> dict[str, float]:
    """`tokens`: trained by the step."""
    if not costs.prices:
        return {}
    found = {"cost/dollars": costs.total, "cost/dollars_per_step": costs.of_step}
    return found | ({"cost/dollars_per_million_tokens": 1e6 * costs.of_step / tokens} if tokens else {})


def _uncommon(row: StepRow) -> dict[str, int]:
    return {
        "lag/outside_tokens": sum(row.outside.values()),
        "lag/mixed_tokens": row.mixed_tokens,
        "lag/old_cache_tokens": row.old_cache_tokens,
    }
