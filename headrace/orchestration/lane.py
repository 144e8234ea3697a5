"""What one pipeline has on disk and remembers: its directory, its storage, its session.

A run has one; a run that trains several adapters has one for each.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.config import RunConfig, config_of_run, dump_config, read_config
from headrace.errors import CheckpointError, HeadraceError
from headrace.observe.build import open_recorder
from headrace.observe.facts import Warned
from headrace.observe.report import write_report
from headrace.observe.resume import Resume
from headrace.observe.summary import print_summary
from headrace.orchestration.checkpoint import Checkpoints
from headrace.orchestration.course import check_bound, check_resumable, same_course
from headrace.orchestration.pieces import pieces_of
from headrace.orchestration.recovery import read_past
from headrace.orchestration.rundir import RunDirectory
from headrace.orchestration.session import Session
from headrace.orchestration.snapshots import load_controller
from headrace.orchestration.storage import Storage, open_storage


@dataclass(frozen=True)
class Lane:
    config: RunConfig
    directory: RunDirectory
    storage: Storage
    session: Session

    @property
    def report(self) -> Path:
        return self.directory.path / "report.html"

    def say_how_to_go_on(self, error: HeadraceError) -> None:
        if last := self.storage.checkpoints.all():
            error.add_note(f"go on from {last[-1].name} with: headrace train --resume {self.directory.path}")

    def close(self) -> None:
        """The report on disk and the summary on the terminal, however the run ended."""
        self.storage.close()
        with suppress(OSError, HeadraceError):  # nor may they hide it
            write_report(self.directory.path, pieces_of(self.directory.path))
        if self.storage.recorder.state.started:
            print_summary(self.storage.recorder.state, self.report)


def open_lane(config: RunConfig, directory: RunDirectory, resume: bool) -> Lane:
    """Raises ConfigError for settings that a resumed run cannot change, CheckpointError without a whole checkpoint."""
    storage = _storage_of_old(config, directory) if resume else _storage_of_new(config, directory)
    for complaint in [
        *config.algo.caveats(config.rollout.max_tokens, config.staleness.max_lag),
        *config.rollout.caveats,
    ]:
        storage.recorder.record(Warned(storage.seconds, complaint))
    return Lane(config, directory, storage, Session(storage))


def _storage_of_new(config: RunConfig, directory: RunDirectory) -> Storage:
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    recorder = open_recorder(config.observe, directory.path)
    return open_storage(directory.path, recorder, checkpoints, config.checkpoint.flush_journal)


def _storage_of_old(config: RunConfig, directory: RunDirectory) -> Storage:
    path = directory.path
    before = read_config(config_of_run(path))
    check_resumable(before, config)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    checkpoint, complaints = _restore_point(checkpoints)
    state = load_controller(checkpoint) if checkpoint else None
    if state and (state.buffer.ready or state.buffer.in_flight):
        check_bound(before, config)
    past = read_past(path, state, same_course(before, config))
    directory.keep_config(dump_config(config), past.step)
    recorder = open_recorder(config.observe, path, Resume(past.step, past.rewinds))
    for complaint in [*complaints, *past.complaints]:
        recorder.record(Warned(past.seconds, complaint))
    return open_storage(path, recorder, checkpoints, config.checkpoint.flush_journal, checkpoint, past)


def _restore_point(checkpoints: Checkpoints) -> tuple[Path | None, list[str]]:
    """The newest good checkpoint, and what to tell the user about it."""
    checkpoint, complaints = checkpoints.newest_good()
    if checkpoint:
        return checkpoint, [f"{complaint}; {checkpoint.name} is used instead" for complaint in complaints]
    if complaints:
        raise CheckpointError("; ".join(complaints) + ". No older checkpoint is whole: start the run again")
    return None, ["no checkpoint had been written: the run goes on from its first step"]
