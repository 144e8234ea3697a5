"""The one place where facts go. Called inside the event loop: a step costs one JSON encoding, other facts microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.observe.facts import StepTrained
from headrace.observe.files import AppendFile
from headrace.observe.records import JOURNAL, METRICS, MetricsFact, encode, journal_step, pick_sample, summarise
from headrace.observe.resume import rewind
from headrace.observe.state import RunState


class Sink(Protocol):
    def record(self, fact: MetricsFact, state: RunState) -> None:
        """`state` has the fact already in it."""

    def close(self) -> None: ...


class Recorder:
    """Implements `protocols.Observer`: metrics and journal on disk, `state` in memory, and every sink."""

    def __init__(self, run_dir: Path, sinks: Sequence[Sink] = (), resume_at_step: int | None = None) -> None:
        """`resume_at_step`: the step of the checkpoint that the run goes on from; 0 also when there was none.

        Raises `ConfigError` when the directory holds a run already and `resume_at_step` is None.
        """
        metrics = run_dir / METRICS
        if resume_at_step is None and metrics.is_file() and metrics.stat().st_size:
            raise ConfigError(f"{run_dir} already holds a run: resume it, or choose another name")
        self.run_dir = run_dir
        self.state = RunState()
        for fact in rewind(run_dir, resume_at_step) if resume_at_step is not None else ():
            self.state.fold(fact)
        self._sinks = list(sinks)
        self._metrics, self._journal = AppendFile(metrics), AppendFile(run_dir / JOURNAL)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def record(self, fact: Any) -> None:
        """Raises `HeadraceError` when the disk does not take it."""
        if isinstance(fact, StepTrained):
            # First the journal: a step that the metrics show can always be replayed.
            self._journal.write(encode(journal_step(fact)))
            self.state.sample = pick_sample(fact) or self.state.sample
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
        self._journal.close()
