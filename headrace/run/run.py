"""A whole run, from a config to a report: what `headrace train` and `headrace.train` do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.core.errors import HeadraceError, WorkerDied
from headrace.core.printing import say
from headrace.durable.atomic_files import full_disk_as_error
from headrace.facts.facts import Warned
from headrace.processes.health.watchdog import Watchdog
from headrace.run.auto.measurer import Measurer
from headrace.run.build import TriedParts, build, open_telemetry
from headrace.run.callbacks import Callbacks
from headrace.run.config import RunConfig
from headrace.run.hosting import Heed, Termination, complete, hosts_here
from headrace.run.lane import Lane, open_lane, report_finished, report_unbegun
from headrace.run.python_inputs import NO_INPUTS, PythonInputs
from headrace.run.rehearse import rehearse
from headrace.run.result import RunResult, result_of
from headrace.run.run_directory import RunDirectory
from headrace.run.seats import local_cores
from headrace.run.session import Notices, report_unhandled, run_clock
from headrace.run.several import train_together
from headrace.run.train_call import TrainCall
from headrace.run.worker.build import libraries_ahead


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
    call = TrainCall(config=config, resume=resume, inputs=inputs, callbacks=callbacks, measurer=measurer)
    with Termination():
        return _through_deaths(call)


def _through_deaths(call: TrainCall) -> RunResult:
    """Trains until the run has ended, with one trainer after the other."""
    while True:
        try:
            return _until_it_ends(call)
        except WorkerDied as error:
            if not call.outlives(error):
                raise
            said = f"death no. {call.deaths.counted} of train.max_deaths = {call.deaths.most}"
            say(f"{error}; {said}: the run goes on from its last checkpoint and its journal")


def _until_it_ends(call: TrainCall) -> RunResult:
    """Trains until the run, or its trainer, has ended. The libraries of its workers are loaded while it is rehearsed."""
    if not hosts_here(call.callbacks.errands if call.callbacks else None):
        return _rehearsed_and_trained(call)  # those libraries belong to the thread of the loop, which comes later
    with libraries_ahead(local_cores(call.config)):
        return _rehearsed_and_trained(call)


def _rehearsed_and_trained(call: TrainCall) -> RunResult:
    config, inputs, resume = call.config, call.inputs, call.resume
    if config.adapters:
        return result_of(call.path, train_together(call))
    rehearsed = None if resume else complete(rehearse(config, inputs, measurer=call.measurer))
    config = rehearsed.config if rehearsed else config
    with full_disk_as_error(call.path), RunDirectory.of(call.path, bool(resume)) as directory:
        lane = open_lane(config, directory, bool(resume))
        if lane.finished:
            report_finished(directory.path, [lane])
            return result_of(directory.path, {"": lane})
        try:
            if rehearsed is None:  # only now, since a finished run needs no rehearsal; its directory is still unchanged
                rehearsed = complete(rehearse(config, inputs, resume))
            for fact in rehearsed.facts(lane.storage.seconds):
                lane.storage.recorder.record(fact)
            _train(call, lane, rehearsed.tried.get(""))
        except HeadraceError as error:
            lane.add_resume_hint(error)
            raise
        finally:
            call.begun |= lane.storage.begun
            lane.close()
        report_unbegun([lane])
        return result_of(directory.path, {"": lane})


def _train(call: TrainCall, lane: Lane, tried: TriedParts | None) -> None:
    config, directory, storage, callbacks = lane.config, lane.directory, lane.storage, call.callbacks
    watchdog = Watchdog(
        directory.logs, warn_after=config.watch.warn_after, stop_after=config.watch.stop_after, writes=not call.resume
    )
    storage.recorder.add(watchdog)
    if callbacks:
        storage.recorder.add(callbacks)

    async def go(on_signal: Callable[[Heed], None]) -> None:
        clock = run_clock(storage.seconds)
        on_signal(Notices(lane.session.interrupt, config.orchestration.grace).hear)
        if callbacks:
            callbacks.attach(lane.session.stop)
        report_unhandled(lambda said: storage.recorder.record(Warned(clock(), said)))
        telemetry = open_telemetry(config, storage.recorder, clock)
        watchdog.add(directory.path, telemetry.waits)
        watchdog.attach()
        await lane.session.run(build(config, directory.logs, storage, call.inputs, telemetry, tried=tried))

    with watchdog:
        call.host(go, [lane])
