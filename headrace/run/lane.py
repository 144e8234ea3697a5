"""A lane: the directory, the storage and the session of one pipeline.

A run has one lane without a name, in the run's own directory. A run that trains several adapters has one for each:

    runs/<name>/             config.toml, logs/ of the two processes
    runs/<name>/<adapter>/   the directory of a run: config.toml, metrics, journal, checkpoints, report
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError, HeadraceError
from headrace.core.printing import echo, say
from headrace.durable.journal import refuse_earlier
from headrace.facts.facts import Warned
from headrace.facts.index_file import DIGEST
from headrace.facts.kept_settings import CONFIG, config_at, contents_in
from headrace.facts.records import left_out
from headrace.loop.checkpoints import ChangedSettings, Checkpoints, load_controller
from headrace.loop.recovery import SavedRun, read_saved_run
from headrace.run.config import RunConfig, adapter_runs, config_of_run, dump_config, read_config
from headrace.run.learning_problems import caveats as algo_caveats
from headrace.run.pieces import pieces_of
from headrace.run.resume_rules import (
    NONE_RECORDED,
    changes,
    check_bound,
    check_resumable,
    check_steps,
    contents_of,
    meaning,
    written,
)
from headrace.run.run_directory import RunDirectory, Storage
from headrace.run.session import Session
from headrace.trainer.config import change_of_rate
from headrace.views.build import has_finished, open_recorder
from headrace.views.report import write_report
from headrace.views.screen.summary import print_summary
from headrace.views.screen.terminal import open_board


@dataclass(frozen=True)
class Lane:
    config: RunConfig
    directory: RunDirectory
    storage: Storage
    session: Session
    finished: bool = False
    """Whether an earlier process has finished the run."""

    @property
    def report(self) -> Path:
        return self.directory.path / "report.html"

    def add_resume_hint(self, error: HeadraceError) -> None:
        if last := self.storage.checkpoints.all():
            error.add_note(f"resume from {last[-1].name} with: headrace train --resume {self.directory.path}")

    def close(self) -> None:
        """Writes the report and prints the summary, however the run ended. Does nothing for a run that did not begin."""
        self.storage.close()
        if not self.storage.begun:
            return
        with suppress(OSError, HeadraceError):  # an error here must not hide the one that ended the run
            write_report(self.directory.path, pieces_of(self.directory.path))
        if self.storage.recorder.state.started:
            print_summary(self.storage.recorder.state, self.report if self.directory.path.exists() else None)


@contextmanager
def open_lanes(config: RunConfig, directory: RunDirectory, resume: bool) -> Iterator[Mapping[str, Lane]]:
    """The lanes of a run by the names of its adapters; the name is empty if there is one. They are closed at the end."""
    with ExitStack() as undo:
        if not config.adapters:
            lane = open_lane(config, directory, resume)
            undo.callback(lane.close)
            yield {"": lane}
            return
        if resume:
            check_resumable(meaning(read_config(config_of_run(directory.path))), meaning(config))
        board = undo.enter_context(open_board(config.observe, [adapter.name for adapter in config.adapters]))
        lanes = {}
        for run in adapter_runs(config):
            path = directory.path / run.name
            # It may be missing in a resumed run that was killed at its start.
            own = undo.enter_context(RunDirectory.of(path, resume and (path / CONFIG).exists()))
            silent = dataclasses.replace(run, observe=dataclasses.replace(run.observe, terminal="off"))
            lanes[run.name] = lane = open_lane(silent, own, resume and own.begun)
            undo.callback(lane.close)
            lane.storage.recorder.add(board.lane(run.name))
        undo.callback(board.close)  # so that the summaries are printed below it
        yield lanes


def open_lane(config: RunConfig, directory: RunDirectory, resume: bool) -> Lane:
    """Reads and checks the directory; only `Storage.begin` changes it.

    Raises ConfigError for settings that a resumed run cannot change, and CheckpointError if every checkpoint is damaged."""
    contents = contents_of(config, contents_in(config_of_run(directory.path)) if resume else NONE_RECORDED)
    path, meant, lines = directory.path, meaning(config, contents), written(contents)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    checkpoint, saved, over = None, None, False
    keep = partial(directory.begin, dump_config(config) + lines)
    if not resume:
        recorder = open_recorder(config.observe, path)
    else:
        checkpoint, saved, complaints = _found(config, path, checkpoints, meant)
        keep = partial(directory.keep_config, dump_config(config) + lines, saved.step)
        over = checkpoint is not None and saved.saved_step == saved.step == config.train.steps
        history = dataclasses.replace(saved.resume, digest=checkpoint / DIGEST if checkpoint else None)
        recorder = open_recorder(config.observe, path, history, over=over)
        if recorder.unreadable:
            complaints.append(left_out(recorder.unreadable, saved.seconds).message)
        for complaint in [*complaints, *saved.complaints]:
            recorder.record(Warned(saved.seconds, complaint))
    storage = Storage(
        run_dir=path,
        recorder=recorder,
        checkpoints=checkpoints,
        flush=config.checkpoint.flush_journal,
        checkpoint=checkpoint,
        saved=saved,
        made_by=meant,
        keep_settings=keep,
        keep_steps=partial(_keep_steps, config, directory, lines),
    )
    lane = Lane(config, directory, storage, Session(storage), finished=over and has_finished(recorder.state))
    if lane.finished:
        lane.session.recall()
        return lane
    caveats = algo_caveats(config.algo, config.rollout.max_tokens, config.staleness.max_lag)
    for complaint in [*caveats, *config.rollout.caveats]:
        recorder.record(Warned(storage.seconds, complaint))
    return lane


def report_unbegun(lanes: Iterable[Lane]) -> None:
    """Reports an interrupt during loading, for which there is no summary."""
    if all(lane.session.reason == "interrupted" and not lane.storage.begun for lane in lanes):
        say("interrupted while loading: nothing was written")


def report_finished(path: Path, lanes: Sequence[Lane]) -> None:
    """Reports that a run is finished, and how to train it further. Nothing in its directory changes."""
    for lane in lanes:
        lane.close()
    steps = max(lane.session.step for lane in lanes)
    own = "" if len(lanes) == 1 else "adapters.{}."
    more = " ".join(f"--set {own.format(lane.config.name)}train.steps={2 * lane.session.step}" for lane in lanes)
    echo(
        f"headrace: {path} is finished: all of its {steps} steps are done. To train it further, give it more steps, for instance: "
        f"headrace train --resume {path} {more}"
    )


def _keep_steps(config: RunConfig, directory: RunDirectory, contents: str, steps: int, step: int) -> None:
    """Saves the settings with another number of steps, from `step` on."""
    train = dataclasses.replace(config.train, steps=steps)
    directory.keep_config(dump_config(dataclasses.replace(config, train=train)) + contents, step)


def _found(
    config: RunConfig, path: Path, checkpoints: Checkpoints, now: Mapping[str, Any]
) -> tuple[Path | None, SavedRun, list[str]]:
    """The saved state of an earlier process, and complaints about damaged checkpoints. `now`: what the settings mean."""
    refuse_earlier(path)
    before, was = read_config(config_of_run(path)), _meant(config_of_run(path))
    check_resumable(was, now)
    checkpoint, complaints = _restore_point(checkpoints)
    state = load_controller(checkpoint) if checkpoint else None
    if state and (state.buffer.ready or state.buffer.in_flight):
        check_bound(before.staleness, config.staleness)
    changed, behind = ChangedSettings(), changes(was, now).steps
    if state:
        written_by = _meant(config_at(path, state.step))
        check_resumable(written_by | state.made_by, now)
        changed = changes(written_by | state.made_by, now)
        behind += changes(written_by, state.made_by).steps  # somebody has edited `config.toml`
    saved = read_saved_run(path, state, not behind, changed, config.rollout.max_tokens)
    check_steps(path, saved.step, config.train.steps)
    rate = change_of_rate(before.train, config.train, saved.step)
    return checkpoint, saved, [*complaints, *([rate] if rate else [])]


def _meant(config_toml: Path) -> dict[str, Any]:
    return meaning(read_config(config_toml), contents_in(config_toml))


def _restore_point(checkpoints: Checkpoints) -> tuple[Path | None, list[str]]:
    """The newest good checkpoint, and warnings for the user."""
    checkpoint, complaints = checkpoints.newest_good()
    if checkpoint:
        return checkpoint, [f"{complaint}; {checkpoint.name} is used instead" for complaint in complaints]
    if complaints:
        raise CheckpointError("; ".join(complaints) + ". No older checkpoint is undamaged: start the run again")
    return None, ["no checkpoint had been written: the run starts from its first step"]
