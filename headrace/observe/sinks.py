"""Scalars for TensorBoard and trackio, with the same names in both and one value per optimizer step. Nothing leaves the machine."""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.observe.facts import Evaluated, IdentityChecked, RunStarted, WeightsLive
from headrace.observe.numbers.engine_use import EngineUse
from headrace.observe.numbers.shares import Tally
from headrace.observe.numbers.state import RunState
from headrace.observe.records import MetricsFact, StepRow


def scalars(fact: MetricsFact, state: RunState) -> tuple[int, dict[str, float]]:
    """Returns the step that a fact belongs to, and its finite numbers; none for facts without numbers."""
    match fact:
        case StepRow():
            step, values = fact.report.version, _step_scalars(fact, state.engine) | _share_scalars(state.shares.recent)
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
    extras = ("reference_kl", "teacher_kl", "outside_tokens", "missing_routes", "routing_conflicts", "dropped_tokens")
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


def _uncommon(row: StepRow) -> dict[str, int]:
    return {
        "lag/outside_tokens": sum(row.outside.values()),
        "lag/mixed_tokens": row.mixed_tokens,
        "lag/old_cache_tokens": row.old_cache_tokens,
    }


class TensorBoardSink:
    """Writes with TensorBoard's own writer, which needs neither torch nor TensorFlow."""

    def __init__(self, directory: Path, resume_at_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))
        if resume_at_step is not None:  # makes TensorBoard discard what the killed process wrote from this step on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_at_step + 1, session_log=start))

    def record(self, fact: MetricsFact, state: RunState) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        step, values = scalars(fact, state)
        if values:
            made = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=made))

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    """Writes to trackio's local database; `trackio show --project headrace` shows it."""

    def __init__(self, project: str = "headrace") -> None:
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(name):
                raise ConfigError(f"observe.trackio writes to this machine only, but {name} is set: unset it")
        self._project = project
        self._run: Any = None

    def record(self, fact: MetricsFact, state: RunState) -> None:
        if isinstance(fact, RunStarted) and self._run is None:
            self._run = self._open(fact)
        step, values = scalars(fact, state)
        if values and self._run is not None:
            self._run.log(values, step=step)

    def _open(self, fact: RunStarted) -> Any:
        import trackio

        settings = {"headline": fact.headline, "seed": fact.seed, "max_lag": fact.max_lag, "steps": fact.steps}
        with contextlib.redirect_stdout(io.StringIO()):  # its greeting would break the live view
            return trackio.init(
                project=self._project,
                name=fact.name,
                config=settings,
                resume="allow" if fact.resumed_at else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def close(self) -> None:
        if self._run is not None:
            import trackio

            with contextlib.redirect_stdout(io.StringIO()):
                trackio.finish()
            self._run = None
