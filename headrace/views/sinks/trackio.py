"""Scalars for a local trackio dashboard. Nothing leaves the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.facts.facts import RunStarted
from headrace.facts.recorder import Sink
from headrace.views.sinks.queued import QueuedSink, described, hushed, id_on_dashboards


def open_sink(run_dir: Path, resume_at_step: int | None, say: Callable[[str], None]) -> Sink:
    return QueuedSink("trackio", TrackioRun(run_dir), say)


class TrackioRun:
    """Writes to trackio's local database; `trackio show --project headrace` shows it."""

    def __init__(self, run_dir: Path, project: str = "headrace") -> None:
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(name):
                raise ConfigError(f"observe.trackio writes to this machine only, but {name} is set: unset it")
        self._run_dir, self._project = run_dir, project
        self._run: Any = None

    def start(self, fact: RunStarted) -> None:
        import trackio

        if self._run is not None:
            return
        with hushed():
            self._run = trackio.init(
                project=self._project,
                name=f"{fact.name}-{id_on_dashboards(self._run_dir)[:6]}",  # it knows a run by its name alone
                config=described(fact),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        if self._run is not None:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            with hushed():
                self._run.finish()
            self._run = None
