"""The one place where facts go. Called inside the event loop: a step costs one JSON encoding, other facts microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.observe.facts import StepTrained
from headrace.observe.files import AppendFile
from headrace.observe.records import METRICS, MetricsFact, pick_samples, read_metrics, summarise
from headrace.observe.resume import Resume, rewind
from headrace.observe.spelling import encode
from headrace.observe.state import RunState


class Sink(Protocol):
    def record(self, fact: MetricsFact, state: RunState) -> None:
        """`state` has the fact already in it."""

    def close(self) -> None: ...


class Recorder:
    """Implements `protocols.Observer`: metrics on disk, `state` in memory, and every sink."""

    def __init__(self, run_dir: Path, sinks: Sequence[Sink] = (), resume: Resume | None = None) -> None:
        """Raises `ConfigError` when the directory holds a run already and `resume` is None."""
        metrics = run_dir / METRICS
        if resume is None and metrics.is_file() and metrics.stat().st_size:
            raise ConfigError(f"{run_dir} already holds a run: resume it, or choose another name")
        self.run_dir = run_dir
        self.state = RunState()
        if resume and resume.rewinds:
            rewind(run_dir, resume.step)
        for fact in read_metrics(run_dir) if resume else ():
            self.state.fold(fact)
        self._sinks = list(sinks)
        self._metrics = AppendFile(metrics)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def record(self, fact: Any) -> None:
        """Raises `HeadraceError` when the disk does not take it."""
        if isinstance(fact, StepTrained):
            self.state.samples = pick_samples(fact) or self.state.samples
            fact = summarise(fact)
        self._metrics.write(encode(fact))
        self.state.fold(fact)
        for sink in self._sinks:
            sink.record(fact, self.state)

    def close(self) -> None:
        """Idempotent. Later facts are refused by the closed files."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        self._metrics.close()
