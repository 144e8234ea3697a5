"""The recorder: every fact passes through it. It is called in the event loop; a step costs one JSON encoding, other facts
microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import ConfigError
from headrace.core.printing import say
from headrace.durable.atomic_files import AppendFile, keep_lines, read_lines
from headrace.durable.spelling import encode
from headrace.facts.facts import StepTrained
from headrace.facts.index_file import Digest, read_digest
from headrace.facts.records import METRICS, MetricsFact, Resume, kept_of, pick_samples, read_metrics_lines, summarise
from headrace.facts.run_state import RunState

LONG = 32 << 20
"""Bytes of metrics of which it is said that they are read: some seconds."""


class Sink(Protocol):
    """A receiver of every fact: a view, a file, a dashboard."""

    def record(self, fact: MetricsFact, state: RunState) -> None:
        """Takes a fact. `state` already includes it."""

    def close(self) -> None: ...


class RememberingSink(Sink, Protocol):
    """A sink that counts over all processes of a run."""

    def go_on(self, digest: Digest) -> bool:
        """Takes all facts that a digest includes. Returns False, and takes none, if their numbers are not there any more."""

    def recall(self, fact: MetricsFact, state: RunState) -> None:
        """Takes a fact of an earlier process. `state` already includes it."""

    def digest(self) -> bytes:
        """Returns a digest of all facts so far; empty if there can be none."""


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
        """`resume`: what an earlier process of the run has done. Its facts are read from the digest's place on, if there is one that fits.
        `index`: a sink that takes the facts of earlier processes too, and writes digests. `waits`: changes nothing on the disk until `begin`, which then writes the facts recorded meanwhile.

        Raises `ConfigError` if the directory already holds a run and `resume` is None."""
        self.run_dir, self._resume, self._index = run_dir, resume, index
        if resume is None and _started(run_dir):
            raise ConfigError(f"{run_dir} already holds a run: resume it, or choose another name")
        self.state, self._start, before = self._sums() or (RunState(), 0, 0)
        lines = read_metrics_lines(run_dir, self._start) if resume else []
        self._kept = kept_of(lines, resume) if resume else []
        for fact, kept in zip(lines, self._kept, strict=True):
            if fact and kept:
                self.state.fold(fact)
                if index:
                    index.recall(fact, self.state)
        self.unreadable = [number for number, fact in enumerate(lines, before + 1) if fact is None]
        """Numbers, counted from 1, of unreadable metrics lines of a resumed run; `begin` removes these lines."""
        self._sinks = [*([index] if index else []), *sinks]
        self._held: list[bytes] = []
        self._metrics: AppendFile | None = None
        if not waits:
            self.begin()

    def _sums(self) -> tuple[RunState, int, int] | None:
        """Returns the state of the checkpoint, and the bytes and lines of the metrics that it counts; None if all have to be read. Nothing
        before that place can be unconfirmed: the checkpoint's own state was taken in the same moment."""
        path = self._resume.digest if self._resume and not self._resume.anew else None
        if path is None:
            return None
        if (digest := read_digest(path, self.run_dir)) and (not self._index or self._index.go_on(digest)):
            return digest.state, digest.size, digest.lines
        size = (self.run_dir / METRICS).stat().st_size if (self.run_dir / METRICS).is_file() else 0
        if size >= LONG:
            say(f"reading all {size / 1e6:,.0f} MB of {METRICS}: {path.parent.name} has no sums that fit it")
        return None

    def begin(self) -> None:
        """Starts writing to the disk. Raises `HeadraceError` if the disk cannot be written."""
        metrics = self.run_dir / METRICS
        if self._resume is None:
            if metrics.is_file():
                metrics.unlink()  # left by a run that was refused at its start
        elif not all(self._kept):
            keep_lines(metrics, self._kept, self._start)
        self._metrics = AppendFile(metrics)
        held, self._held = self._held, []
        for line in held:
            self._metrics.write(line)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def record(self, fact: Any) -> None:
        """Records one fact. Raises `HeadraceError` if the disk cannot be written, and at a step if the file was deleted or changed by somebody else."""
        if isinstance(fact, StepTrained):
            if self._metrics:
                self._metrics.check()
            self.state.samples = tuple(pick_samples(fact)) or self.state.samples
            fact = summarise(fact)
        line = encode(fact)
        if self._metrics:
            self._metrics.write(line)
        else:
            self._held.append(line)
        self.state.fold(fact)
        for sink in self._sinks:
            sink.record(fact, self.state)

    def digest(self) -> bytes:
        """Returns a digest of all facts so far, for the checkpoint of this moment; empty if there can be none."""
        return self._index.digest() if self._index else b""

    def close(self) -> None:
        """Closes sinks and files; may be called twice. Later facts raise an error."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        if self._metrics:
            self._metrics.close()


def _started(run_dir: Path) -> bool:
    return any(b'"RunStarted"' in line for line in read_lines(run_dir / METRICS))
