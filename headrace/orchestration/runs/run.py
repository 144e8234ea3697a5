"""A whole run, from a config to a report: what `headrace train` and `headrace.train` do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from headrace.auto.measurer import Measurer
from headrace.config import RunConfig, config_of_run, read_config
from headrace.durable.atomic_files import full_disk_as_error
from headrace.errors import HeadraceError, WorkerDied
from headrace.observe.facts import Warned
from headrace.observe.health.watchdog import Watchdog
from headrace.orchestration.build import build, open_telemetry
from headrace.orchestration.python_inputs import NO_INPUTS, PythonInputs
from headrace.orchestration.runs.callbacks import Callbacks
from headrace.orchestration.runs.hosting import Act, complete, host
from headrace.orchestration.runs.lane import Lane, open_lane, report_finished, report_unbegun
from headrace.orchestration.runs.rehearse import rehearse
from headrace.orchestration.runs.result import RunResult, result_of
from headrace.orchestration.runs.session import report_unhandled, run_clock
from headrace.orchestration.runs.several import train_together
from headrace.orchestration.store.run_directory import CONFIG, RunDirectory
from headrace.printing import say


def train(
    config: RunConfig,
    resume: Path | None = None,
    inputs: PythonInputs = NO_INPUTS,
    callbacks: Callbacks | None = None,
    measurer: Measurer | None = None,
) -> RunResult:
    """Trains until the last step, an interrupt or an error. In each case it prints a summary and writes a report.

    `resume`: the directory of the run to resume, from its newest good checkpoint. `inputs`: functions and rows that the settings name
    but cannot hold. `callbacks` are called in this thread. `measurer`: as for `rehearse`.

    Raises `HeadraceError` with one sentence if the run could not be finished, and whatever a callback raised. An error that can be found
    before a model is loaded is a `ConfigError`, and nothing has been written then.
    """
    for death in itertools.count(1):
        try:
            return _until_it_ends(config, resume, inputs, callbacks, measurer)
        except WorkerDied as error:
            path, most = resume or config.run_dir, config.train.max_deaths
            if error.who != "trainer" or death > most or not (path / CONFIG).exists():
                raise
            said = f"death no. {death} of train.max_deaths = {most}"
            say(f"{error}; {said}: the run goes on from its last checkpoint and its journal")
            resume, config = path, read_config(config_of_run(path))
    raise AssertionError


def _until_it_ends(
    config: RunConfig,
    resume: Path | None,
    inputs: PythonInputs,
    callbacks: Callbacks | None,
    measurer: Measurer | None,
) -> RunResult:
    """Trains until the run, or its trainer, has ended."""
    if config.adapters:
        lanes = train_together(config, inputs, resume, callbacks, measurer)
        return result_of(resume or config.run_dir, lanes)
    rehearsed = None if resume else complete(rehearse(config, inputs, measurer=measurer))
    config = rehearsed.config if rehearsed else config
    with (
        full_disk_as_error(resume or config.run_dir),
        RunDirectory.of(resume or config.run_dir, bool(resume)) as directory,
    ):
        lane = open_lane(config, directory, bool(resume))
        if lane.finished:
            report_finished(directory.path, [lane])
            return result_of(directory.path, {"": lane})
        try:
            if rehearsed is None:  # only now, since a finished run needs no rehearsal; its directory is still unchanged
                rehearsed = complete(rehearse(config, inputs, resume))
            for fact in rehearsed.facts(lane.storage.seconds):
                lane.storage.recorder.record(fact)
            _train(lane, inputs, callbacks, writes=not resume)
        except HeadraceError as error:
            lane.add_resume_hint(error)
            raise
        finally:
            lane.close()
        report_unbegun([lane])
        return result_of(directory.path, {"": lane})


def _train(lane: Lane, inputs: PythonInputs, callbacks: Callbacks | None, writes: bool) -> None:
    config, directory, storage = lane.config, lane.directory, lane.storage
    watchdog = Watchdog(
        directory.logs, warn_after=config.watch.warn_after, stop_after=config.watch.stop_after, writes=writes
    )
    storage.recorder.add(watchdog)
    if callbacks:
        storage.recorder.add(callbacks)

    async def go(on_interrupt: Callable[[Act], None]) -> None:
        clock = run_clock(storage.seconds)
        on_interrupt(lane.session.interrupt)
        if callbacks:
            callbacks.attach(lane.session.stop)
        report_unhandled(lambda said: storage.recorder.record(Warned(clock(), said)))
        telemetry = open_telemetry(config, storage.recorder, clock)
        watchdog.add(directory.path, telemetry.waits)
        watchdog.attach()
        await lane.session.run(build(config, directory.logs, storage, inputs, telemetry))

    with watchdog:
        host(go, callbacks.errands if callbacks else None)
    if callbacks:
        callbacks.raise_error(f"resume it with headrace.train(resume={str(directory.path)!r})")
