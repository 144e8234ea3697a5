"""What one pipeline has on disk and remembers: its directory, its storage, its session.

A run has one; a run that trains several adapters has one for each.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.algo.caveats import caveats as algo_caveats
from headrace.config import RunConfig, config_of_run, dump_config, read_config
from headrace.errors import CheckpointError, HeadraceError
from headrace.observe.build import open_recorder
from headrace.observe.facts import RunEnded, RunStarted, Warned
from headrace.observe.records import left_out, read_metrics
from headrace.observe.report import write_report
from headrace.observe.screen.summary import print_summary
from headrace.orchestration.runs.pieces import pieces_of
from headrace.orchestration.runs.session import Session
from headrace.orchestration.store.checkpoints import Checkpoints
from headrace.orchestration.store.recovery import SavedRun, read_saved_run
from headrace.orchestration.store.resume_rules import check_bound, check_resumable, check_steps, same_training
from headrace.orchestration.store.run_directory import RunDirectory
from headrace.orchestration.store.snapshots import load_controller
from headrace.orchestration.store.storage import Storage


@dataclass(frozen=True)
class Lane:
    config: RunConfig
    directory: RunDirectory
    storage: Storage
    session: Session
    finished: bool = False
    """Whether an earlier process of the run has done all that there is to do."""

    @property
    def report(self) -> Path:
        return self.directory.path / "report.html"

    def add_resume_hint(self, error: HeadraceError) -> None:
        if last := self.storage.checkpoints.all():
            error.add_note(f"go on from {last[-1].name} with: headrace train --resume {self.directory.path}")

    def close(self) -> None:
        """The report on disk and the summary on the terminal, however the run ended; nothing of one that did not begin."""
        self.storage.close()
        if not self.storage.begun:
            return
        with suppress(OSError, HeadraceError):  # nor may they hide it
            write_report(self.directory.path, pieces_of(self.directory.path))
        if self.storage.recorder.state.started:
            print_summary(self.storage.recorder.state, self.report if self.directory.path.exists() else None)


def open_lane(config: RunConfig, directory: RunDirectory, resume: bool) -> Lane:
    """Reads and checks; it is `Storage.begin` that changes the directory.

    Raises ConfigError for settings that a resumed run cannot change, CheckpointError without a whole checkpoint."""
    if not resume:
        return _with_caveats(config, directory, _storage_of_new(config, directory))
    path, (checkpoints, checkpoint, saved, complaints) = directory.path, _found(config, directory)
    finished = checkpoint is not None and saved.saved_step == saved.step == config.train.steps and _said_so(path)
    observe = dataclasses.replace(config.observe, terminal="off") if finished else config.observe
    recorder = open_recorder(observe, path, saved.resume)
    if recorder.unreadable:
        complaints.append(left_out(recorder.unreadable, saved.seconds).message)
    for complaint in [*complaints, *saved.complaints]:
        recorder.record(Warned(saved.seconds, complaint))
    keep = partial(directory.keep_config, dump_config(config), saved.step)
    steps = partial(_keep_steps, config, directory)
    storage = Storage(
        run_dir=path,
        recorder=recorder,
        checkpoints=checkpoints,
        flush=config.checkpoint.flush_journal,
        checkpoint=checkpoint,
        saved=saved,
        keep_settings=keep,
        keep_steps=steps,
    )
    if finished:
        lane = Lane(config, directory, storage, Session(storage), finished)
        lane.session.recall()
        return lane
    return _with_caveats(config, directory, storage)


def report_unbegun(lanes: Iterable[Lane]) -> None:
    """Where there is no summary that would say it."""
    if all(lane.session.reason == "interrupted" and not lane.storage.begun for lane in lanes):
        print("headrace: interrupted while loading: nothing was written", file=sys.stderr)


def report_finished(path: Path, lanes: Sequence[Lane]) -> None:
    """Of a run whose adapters have all done what they were to do. Nothing of it is changed."""
    for lane in lanes:
        lane.close()
    steps = max(lane.session.step for lane in lanes)
    more = (
        f"--set train.steps={2 * steps}" if len(lanes) == 1 else "CONFIG.toml (with more train.steps for its adapters)"
    )
    print(
        f"headrace: {path} is finished: all of its {steps} steps are done. To go on, give it more of them, for instance: "
        f"headrace train --resume {path} {more}"
    )


def _with_caveats(config: RunConfig, directory: RunDirectory, storage: Storage) -> Lane:
    caveats = algo_caveats(config.algo, config.rollout.max_tokens, config.staleness.max_lag)
    for complaint in [*caveats, *config.rollout.caveats]:
        storage.recorder.record(Warned(storage.seconds, complaint))
    return Lane(config, directory, storage, Session(storage))


def _storage_of_new(config: RunConfig, directory: RunDirectory) -> Storage:
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    recorder, begin = open_recorder(config.observe, directory.path), partial(directory.begin, dump_config(config))
    steps = partial(_keep_steps, config, directory)
    return Storage(
        run_dir=directory.path,
        recorder=recorder,
        checkpoints=checkpoints,
        flush=config.checkpoint.flush_journal,
        checkpoint=None,
        saved=None,
        keep_settings=begin,
        keep_steps=steps,
    )


def _keep_steps(config: RunConfig, directory: RunDirectory, steps: int, step: int) -> None:
    """The settings with another number of steps, from `step` on."""
    train = dataclasses.replace(config.train, steps=steps)
    directory.keep_config(dump_config(dataclasses.replace(config, train=train)), step)


def _found(config: RunConfig, directory: RunDirectory) -> tuple[Checkpoints, Path | None, SavedRun, list[str]]:
    """What an earlier process left, and what is wrong with it."""
    path = directory.path
    before = read_config(config_of_run(path))
    check_resumable(before, config)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    checkpoint, complaints = _restore_point(checkpoints)
    state = load_controller(checkpoint) if checkpoint else None
    if state and (state.buffer.ready or state.buffer.in_flight):
        check_bound(before, config)
    saved = read_saved_run(path, state, same_training(before, config))
    check_steps(path, saved.step, config.train.steps)
    return checkpoints, checkpoint, saved, complaints


def _said_so(path: Path) -> bool:
    """Whether the last process of the run came to its end."""
    told = [fact for fact in read_metrics(path) if isinstance(fact, RunStarted | RunEnded)]
    return bool(told) and isinstance(told[-1], RunEnded) and told[-1].reason == "finished"


def _restore_point(checkpoints: Checkpoints) -> tuple[Path | None, list[str]]:
    """The newest good checkpoint, and what to tell the user about it."""
    checkpoint, complaints = checkpoints.newest_good()
    if checkpoint:
        return checkpoint, [f"{complaint}; {checkpoint.name} is used instead" for complaint in complaints]
    if complaints:
        raise CheckpointError("; ".join(complaints) + ". No older checkpoint is whole: start the run again")
    return None, ["no checkpoint had been written: the run goes on from its first step"]
