"""What one pipeline has on disk and remembers: its directory, its checkpoints, its recorder, its session.

A run has one; a run that trains several adapters has one for each.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.config import RunConfig, check_resumable, config_of_run, dump_config, read_config
from headrace.errors import CheckpointError, HeadraceError
from headrace.observe.build import open_recorder
from headrace.observe.facts import Warned
from headrace.observe.recorder import Recorder
from headrace.observe.report import write_report
from headrace.observe.summary import print_summary
from headrace.orchestration.checkpoint import Checkpoints
from headrace.orchestration.rundir import RunDirectory
from headrace.orchestration.session import Session
from headrace.orchestration.snapshots import ControllerState, load_controller


@dataclass(frozen=True)
class Lane:
    config: RunConfig
    directory: RunDirectory
    recorder: Recorder
    checkpoints: Checkpoints
    checkpoint: Path | None
    """That it goes on from."""
    state: ControllerState | None
    session: Session

    @property
    def seconds(self) -> float:
        """Its age so far."""
        return self.state.seconds if self.state else 0.0

    @property
    def report(self) -> Path:
        return self.directory.path / "report.html"

    def say_how_to_go_on(self, error: HeadraceError) -> None:
        if last := self.checkpoints.all():
            error.add_note(f"go on from {last[-1].name} with: headrace train --resume {self.directory.path}")

    def close(self) -> None:
        """The report on disk and the summary on the terminal, however the run ended."""
        self.recorder.close()
        with suppress(OSError, HeadraceError):  # nor may they hide it
            write_report(self.directory.path)
        if self.recorder.state.started:
            print_summary(self.recorder.state, self.report)


def open_lane(config: RunConfig, directory: RunDirectory, resume: bool) -> Lane:
    """Raises ConfigError for settings that a resumed run cannot change, CheckpointError without a whole checkpoint."""
    path = directory.path
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    checkpoint, complaints = _restore_point(checkpoints) if resume else (None, [])
    state = load_controller(checkpoint) if checkpoint else None
    step = state.step if state else 0
    if resume:
        check_resumable(read_config(config_of_run(path)), config)
        directory.keep_config(dump_config(config), step)
    recorder = open_recorder(config.observe, path, step if resume else None)
    for complaint in [*complaints, *config.algo.caveats(config.rollout.max_tokens), *config.rollout.caveats]:
        recorder.record(Warned(state.seconds if state else 0.0, complaint))
    return Lane(config, directory, recorder, checkpoints, checkpoint, state, Session(recorder, state))


def _restore_point(checkpoints: Checkpoints) -> tuple[Path | None, list[str]]:
    """The newest good checkpoint, and what to tell the user about it."""
    checkpoint, complaints = checkpoints.newest_good()
    if checkpoint:
        return checkpoint, [f"{complaint}; {checkpoint.name} is used instead" for complaint in complaints]
    if complaints:
        raise CheckpointError("; ".join(complaints) + ". No older checkpoint is whole: start the run again")
    return None, ["no checkpoint had been written: the run starts over from its config"]
