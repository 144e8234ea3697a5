"""The one place of this folder that names its concrete sinks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.observe.config import ObserveConfig, check_installed
from headrace.observe.recorder import Recorder, Sink


def open_recorder(config: ObserveConfig, run_dir: Path, resume_at_step: int | None = None) -> Recorder:
    """A recorder with everything that `config` asks for; the terminal view begins to move at once.

    `resume_at_step`: None for a fresh run; else the step of the checkpoint it goes on from (0 also when there was none).
    Raises `ConfigError` when a sink's package is missing, or when the directory already holds a run.
    """
    check_installed(config)
    recorder = Recorder(run_dir, resume_at_step=resume_at_step)
    try:
        for sink in _sinks(config, run_dir, resume_at_step):
            recorder.add(sink)
    except BaseException:
        recorder.close()
        raise
    return recorder


def _sinks(config: ObserveConfig, run_dir: Path, resume_at_step: int | None) -> list[Sink]:
    from headrace.observe.sinks import TensorBoardSink, TrackioSink

    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_at_step))
    if config.trackio:
        sinks.append(TrackioSink())
    if terminal := _terminal(config):  # last: nothing may fail once the live view owns the screen
        sinks.append(terminal)
    return sinks


def _terminal(config: ObserveConfig) -> Sink | None:
    from headrace.observe.terminal import LiveTerminal, PlainTerminal

    mode = config.terminal
    if mode == "auto":
        mode = "live" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    match mode:
        case "live":
            return LiveTerminal()
        case "plain":
            return PlainTerminal()
    return None
