"""Creates the recorder and its sinks: the one file here that names the concrete classes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from headrace.facts.facts import Warned
from headrace.facts.index_file import NumbersIndex
from headrace.facts.recorder import Recorder, Sink
from headrace.facts.records import Resume
from headrace.facts.run_state import RunState
from headrace.views.config import ObserveConfig, check_installed


def open_recorder(
    config: ObserveConfig, run_dir: Path, resume: Resume | None = None, *, over: bool = False
) -> Recorder:
    """Returns a recorder with the sinks that `config` asks for. The terminal view starts at once, everything else with `Recorder.begin`.

    `resume`: None for a fresh run. `over`: whether all steps of that run are done; there is no view of one that has recorded its end.
    Raises `ConfigError` if a sink's package is missing, or the directory already holds a run.
    """
    check_installed(config)
    step = resume.step if resume else None
    recorder = Recorder(run_dir, (), resume, waits=True, index=NumbersIndex(run_dir))
    try:
        for name in config.sinks:
            warn = lambda words: recorder.record(Warned(recorder.state.now, words))  # noqa: E731
            recorder.add(import_module(f"headrace.views.sinks.{name}").open_sink(run_dir, step, warn))
        if (
            terminal := None if over and has_finished(recorder.state) else _terminal(config)
        ):  # last: nothing may fail once the live view owns the screen
            recorder.add(terminal)
    except BaseException:
        recorder.close()
        raise
    return recorder


def has_finished(state: RunState) -> bool:
    """Returns whether the last process of a run recorded that it finished."""
    return state.ended is not None and state.ended.reason == "finished"


def _terminal(config: ObserveConfig) -> Sink | None:
    from headrace.views.screen.terminal import LiveTerminal, PlainTerminal, terminal_mode

    match terminal_mode(config):
        case "live":
            return LiveTerminal()
        case "plain":
            return PlainTerminal()
    return None
