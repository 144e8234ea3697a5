"""A whole run, from a config to a report: what `headrace train` and `headrace.train` do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError, WorkerDied
from headrace.core.printing import say
from headrace.durable.atomic_files import full_disk_as_error
from headrace.processes.health.watchdog import Watchdog
from headrace.run.auto.measurer import Measurer
from headrace.run.build import LoadedFiles, open_telemetry
from headrace.run.callbacks import Callbacks
from headrace.run.config import RunConfig, dump_config
from headrace.run.hosting import Heed, Termination, complete, hosts_here
from headrace.run.lane import Lane, open_lanes, report_finished, report_unbegun
from headrace.run.open_parts import open_parts
from headrace.run.python_inputs import NO_INPUTS, PythonInputs
from headrace.run.rehearse import rehearse
from headrace.run.result import RunResult, result_of
from headrace.run.run_directory import RunDirectory
from headrace.run.seats import local_cores
from headrace.run.session import BuiltRun, Notices, report_unhandled, run_clock
from headrace.run.train_call import TrainCall
from headrace.run.worker.build import libraries_ahead
from headrace.settings.process_config import WatchConfig


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
    rehearsed = None if resume else complete(rehearse(config, inputs, measurer=call.measurer))
    config = rehearsed.config if rehearsed else config
    with full_disk_as_error(call.path), RunDirectory.of(call.path, bool(resume)) as directory:
        with open_lanes(config, directory, bool(resume)) as lanes:
            if all(lane.finished for lane in lanes.values()):
                report_finished(directory.path, list(lanes.values()))
                return result_of(directory.path, lanes)
            try:
                # A resumed run only now, since a finished one needs no rehearsal. Its directory is still unchanged.
                if rehearsed is None:
                    rehearsed = complete(rehearse(config, inputs, resume))
                for lane in lanes.values():
                    for fact in rehearsed.facts(lane.storage.seconds):
                        lane.storage.recorder.record(fact)
                with _watchdog(config.watch, directory, writes=not resume) as watchdog:
                    running = _RunningLanes(call, config, directory, lanes, watchdog)
                    call.host(partial(running.run, rehearsed.tried), lanes.values())
            except HeadraceError as error:
                if alone := lanes.get(""):
                    alone.add_resume_hint(error)
                raise
        report_unbegun(lanes.values())
        return result_of(directory.path, lanes)


def _watchdog(watch: WatchConfig, directory: RunDirectory, *, writes: bool) -> Watchdog:
    return Watchdog(directory.logs, warn_after=watch.warn_after, stop_after=watch.stop_after, writes=writes)


class _AllRecorders:
    """Records facts about the two shared processes in the recorder of every lane."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes

    def record(self, fact: Any) -> None:
        for lane in self._lanes.values():
            lane.storage.recorder.record(fact)


class _RunningLanes:
    """The lanes of a run, from the start of its processes to their end.

    They share only these two processes. The trainer serves calls in the order in which they arrive, and each pipeline makes one call
    at a time, so the steps of different adapters take turns. The engine serves the requests of all adapters in one batch."""

    def __init__(
        self,
        call: TrainCall,
        config: RunConfig,
        directory: RunDirectory,
        lanes: Mapping[str, Lane],
        watchdog: Watchdog,
    ) -> None:
        self._call, self._config, self._directory, self._lanes = call, config, directory, lanes
        self._watchdog = watchdog
        self._built: dict[str, BuiltRun] = {}

    async def run(self, tried: Mapping[str, LoadedFiles], on_signal: Callable[[Heed], None]) -> None:
        """Trains all lanes to their last step. If one fails, the others stop with a checkpoint, and its error is raised. `tried`: as for
        `open_parts`."""
        for lane in self._lanes.values():
            lane.session.loads()
        on_signal(Notices(self._interrupt, self._config.orchestration.grace).hear)
        try:
            async with self._opened(tried) as begin:
                self._built = {name: begins() for name, begins in begin.items()}
                self._keep_settings()
                await self._train()
        except asyncio.CancelledError:
            pass
        for lane in self._lanes.values():
            if not lane.session.over:  # it was interrupted before it began
                lane.session.leave()

    def _opened(
        self, tried: Mapping[str, LoadedFiles]
    ) -> AbstractAsyncContextManager[Mapping[str, Callable[[], BuiltRun]]]:
        clock = run_clock(max(lane.storage.seconds for lane in self._lanes.values()))
        telemetry = {"": open_telemetry(self._config.watch, _AllRecorders(self._lanes), clock)}
        for name, lane in self._lanes.items():
            if name:
                self._watchdog.add(lane.directory.path, telemetry[""].waits)
                telemetry[name] = open_telemetry(lane.config.watch, lane.storage.recorder, clock)
            self._watchdog.add(lane.directory.path, telemetry[name].waits)
            lane.storage.recorder.add(self._watchdog)
            if callbacks := self._call.callbacks:
                callbacks.attach(lane.session.stop)
                lane.storage.recorder.add(callbacks)
        report_unhandled(telemetry[""].warn)
        self._watchdog.attach()
        return open_parts(
            self._config, self._lanes, telemetry, logs=self._directory.logs, inputs=self._call.inputs, tried=tried
        )

    def _keep_settings(self) -> None:
        """The settings of all lanes together; one lane without a name has kept its own."""
        settings = dump_config(self._config)
        if "" not in self._lanes and self._call.resume:
            self._directory.keep_config(settings, step=0)
        elif "" not in self._lanes:
            self._directory.begin(settings)
        self._call.begun = True

    async def _train(self) -> None:
        running = {lane.session.start(self._built[name]): name for name, lane in self._lanes.items()}
        done, others = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in done if not task.cancelled() and task.exception()]
        if not failed:
            return
        name, error = running[failed[0]], failed[0].exception()
        assert error is not None
        for task in others:
            self._lanes[running[task]].session.interrupt(f"the adapter {name} failed ({error})", again="", asked=False)
        await asyncio.gather(*others, return_exceptions=True)  # only the first error is raised
        if name and isinstance(error, HeadraceError):
            error.add_note(
                f"it was the adapter {name}; resume the run with: headrace train --resume {self._directory.path}"
            )
        raise error

    def _interrupt(self, why: str, again: str) -> None:
        sessions = [lane.session for lane in self._lanes.values() if not lane.session.over]
        for session in sessions:
            session.interrupt(why, again)
        if not sessions:
            for built in self._built.values():
                built.kill()
