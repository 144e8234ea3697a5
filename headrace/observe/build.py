"""Creates the recorder and its sinks: the one file here that names the concrete classes."""

from __future__ import annotations

from pathlib import Path

from headrace.observe.config import ObserveConfig, check_installed
from headrace.observe.recorder import Recorder, Sink
from headrace.observe.resume import Resume


def open_recorder(config: ObserveConfig, run_dir: Path, resume: Resume | None = None) -> Recorder:
    """Returns a recorder with the sinks that `config` asks for. The terminal view starts at once, everything else with `Recorder.begin`.

    `resume`: None for a fresh run.
    Raises `ConfigError` if a sink's package is missing, or the directory already holds a run.
    """
    check_installed(config)
    step = resume.step if resume else None
    recorder = Recorder(run_dir, (), resume, waits=True, sinks_on_disk=lambda: _sinks_on_disk(config, run_dir, step))
    try:
        for sink in _sinks(config):
            recorder.add(sink)
    except BaseException:
        recorder.close()
        raise
    return recorder


def _sinks(config: ObserveConfig) -> list[Sink]:
    from headrace.observe.sinks import TrackioSink

    sinks: list[Sink] = [TrackioSink()] if config.trackio else []
    if terminal := _terminal(config):  # last: nothing may fail once the live view owns the screen
        sinks.append(terminal)
    return sinks


def _sinks_on_disk(config: ObserveConfig, run_dir: Path, resume_at_step: int | None) -> list[Sink]:
    from headrace.observe.sinks import TensorBoardSink

    return [TensorBoardSink(run_dir / "tensorboard", resume_at_step)] if config.tensorboard else []


def _terminal(config: ObserveConfig) -> Sink | None:
    from headrace.observe.screen.surface import terminal_mode
    from headrace.observe.screen.terminal import LiveTerminal, PlainTerminal

    match terminal_mode(config):
        case "live":
            return LiveTerminal()
        case "plain":
            return PlainTerminal()
    return None
