"""Scalars for TensorBoard, in the directory of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.facts.facts import RunStarted
from headrace.facts.recorder import Sink
from headrace.views.sinks.queued import QueuedSink


def open_sink(run_dir: Path, resume_at_step: int | None, say: Callable[[str], None]) -> Sink:
    again_from = None if resume_at_step is None else resume_at_step + 1
    return QueuedSink(
        "tensorboard", TensorBoardFiles(run_dir / "tensorboard", again_from), say, forgets_from=again_from
    )


class TensorBoardFiles:
    """Writes with TensorBoard's own writer, which needs neither torch nor TensorFlow. Its file is created with the first value."""

    def __init__(self, directory: Path, again_from: int | None = None) -> None:
        """`again_from`: the first step that a resumed process does again; TensorBoard then drops what the killed one wrote of it and later ones."""
        self._directory, self._again_from = directory, again_from
        self._writer: Any = None

    def start(self, fact: RunStarted) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer = self._writer or self._open(at)
        made = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=at, step=step, summary=made))

    def _open(self, at: float) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(self._directory))
        if self._again_from is not None:
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=at, step=self._again_from, session_log=start))
        return writer

    def close(self) -> None:
        if self._writer:
            self._writer.close()
