"""The recorder: every fact passes through it. It is called in the event loop; a step costs one JSON encoding, other facts
microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.durable.atomic_files import AppendFile, keep_lines, read_lines
from headrace.durable.spelling import encode
from headrace.errors import ConfigError
from headrace.observe.facts import StepTrained
from headrace.observe.numbers.state import RunState
from headrace.observe.records import METRICS, MetricsFact, pick_samples, read_metrics_lines, summarise
from headrace.observe.resume import Resume, kept_of


class Sink(Protocol):
    """A receiver of every fact: a view, a file, a dashboard."""

    def record(self, fact: MetricsFact, state: RunState) -> None:
        """Takes a fact. `state` already includes it."""

    def close(self) -> None: ...


class RememberingSink(Sink, Protocol):
    """A sink that counts over all processes of a run."""

    def recall(self, fact: MetricsFact, state: RunState) -> None:
        """Takes a fact of an earlier process. `state` already includes it."""


class Recorder:
    """Writes facts to `metrics.jsonl`, folds them into `state` and passes them to every sink. Implements `protocols.Observer`."""

    def __init__(
        self,
        run_dir: Path,
        sinks: Sequence[Sink] = (),
        resume: Resume | None = None,
        waits: bool = False,
        index: RememberingSink | None = None,
    ) -> None:
        """`index`: a sink that takes the facts of earlier processes of the run too. `waits`: changes nothing on the disk until `begin`, which then writes the facts recorded meanwhile.

        Raises `ConfigError` if the directory already holds a run and `resume` is None."""
        self.run_dir, self._resume = run_dir, resume
        if resume is None and _started(run_dir):
            raise ConfigError(f"{run_dir} already holds a run: resume it, or choose another name")
        self.state = RunState()
        lines = read_metrics_lines(run_dir) if resume else []
        self._kept = kept_of(lines, resume) if resume else []
        for fact, kept in zip(lines, self._kept, strict=True):
            if fact and kept:
                self.state.fold(fact)
                if index:
                    index.recall(fact, self.state)
        self.unreadable = [number for number, fact in enumerate(lines, 1) if fact is None]
        """Numbers, counted from 1, of unreadable metrics lines of a resumed run; `begin` removes these lines."""
        self._sinks = [*([index] if index else []), *sinks]
        self._held: list[bytes] = []
        self._metrics: AppendFile | None = None
        if not waits:
            self.begin()

    def begin(self) -> None:
        """Starts writing to the disk. Raises `HeadraceError` if the disk cannot be written."""
        metrics = self.run_dir / METRICS
        if self._resume is None:
            if metrics.is_file():
                metrics.unlink()  # left by a run that was refused at its start
        elif not all(self._kept):
            keep_lines(metrics, self._kept)
        self._metrics = AppendFile(metrics)
        held, self._held = self._held, []
        for line in held:
            self._metrics.write(line)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def record(self, fact: Any) -> None:
        """Records one fact. Raises `HeadraceError` if the disk cannot be written."""
        if isinstance(fact, StepTrained):
            self.state.samples = pick_samples(fact) or self.state.samples
            fact = summarise(fact)
        line = encode(fact)
        if self._metrics:
            self._metrics.write(line)
        else:
            self._held.append(line)
        self.state.fold(fact)
        for sink in self._sinks:
            sink.record(fact, self.state)

    def close(self) -> None:
        """Closes sinks and files; may be called twice. Later facts raise an error."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        if self._metrics:
            self._metrics.close()


def _started(run_dir: Path) -> bool:
    return any(b'"RunStarted"' in line for line in read_lines(run_dir / METRICS))
