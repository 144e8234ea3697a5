"""Scalars for a local trackio dashboard. Nothing leaves the machine."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.observe.facts import RunStarted
from headrace.observe.numbers.state import RunState
from headrace.observe.recorder import Sink
from headrace.observe.records import MetricsFact
from headrace.observe.sinks.scalars import scalars


def open_sink(run_dir: Path, resume_at_step: int | None) -> Sink:
    return TrackioSink()


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
