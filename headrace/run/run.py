"""A whole run, from a config to a report: what `headrace train` and `headrace.train` do."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from headrace.core.errors import ConfigError, HeadraceError, StopTraining, WorkerDied
from headrace.core.printing import say
from headrace.durable.atomic_files import full_disk_as_error
from headrace.facts.facts import Evaluated, WarmStarted
from headrace.facts.progress import Evaluation, Step
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.run_state import RunState
from headrace.processes.health.watchdog import Watchdog
from headrace.processes.process_end import Deaths
from headrace.run.auto.measurer import Measurer
from headrace.run.build import LoadedFiles, open_telemetry
from headrace.run.config import RunConfig, config_of_run, dump_config, read_config
from headrace.run.hosting import Errands, Heed, Main, Termination, complete, run_loop, runs_here
from headrace.run.lane import Lane, open_lanes, report_finished, report_unbegun
from headrace.run.open_parts import open_parts
from headrace.run.python_inputs import NO_INPUTS, PythonInputs
from headrace.run.rehearse import rehearse
from headrace.run.result import RunResult, result_of
from headrace.run.run_directory import RunDirectory, shown_waiting
from headrace.run.seats import local_cores
from headrace.run.session import BuiltRun, Notices, report_unhandled, run_clock
from headrace.run.warm_start import begins_with, warm_started, warmed
from headrace.run.worker.build import libraries_ahead
from headrace.settings.process_config import WatchConfig
from headrace.settings.user_code import one_line

AGAIN = 10.0
"""Seconds between two attempts to go on after a trainer's death."""

# --- One call of `train`
# What it was asked for, which holds for all processes of its trainer, however many of them die.


@dataclass(kw_only=True)
class TrainCall:
    config: RunConfig
    resume: Path | None
    """The directory of the run to resume. None for a new run, until its trainer dies."""
    inputs: PythonInputs
    callbacks: Callbacks | None
    measurer: Measurer | None
    begun: bool = False
    """Whether `config.toml` in the run's directory holds the settings of this call. Until all is loaded it holds those of an earlier one."""
    deaths: Deaths = field(init=False)
    """The deaths of the trainer."""
    worked: float = 0.0
    """Seconds from the beginning of training to the last step that was done, in the present process of the trainer."""

    def __post_init__(self) -> None:
        self.deaths = Deaths(self.config.train.max_deaths)

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.resume or self.config.run_dir

    def outlives(self, error: WorkerDied) -> bool:
        """Whether the run goes on by itself after this death. It then does so with the settings of this call."""
        if error.who != "trainer" or not (self.begun or self.resume):
            return False
        self.deaths.after(self.worked)
        self.deaths.add()
        self.worked = 0.0
        if self.deaths.too_many:
            if self.deaths.most:
                error.add_note(self.deaths.said("train.max_deaths"))
            return False
        self.resume = self.path
        if self.begun:  # what was chosen at the start, and the steps that fit into `train.minutes`
            self.config = read_config(config_of_run(self.resume))
        return True

    @property
    def goes_on(self) -> bool:
        """Whether the run's trainer has died, and no step has been done since."""
        return self.deaths.total > 0 and not self.worked

    def run_loop(self, main: Main, lanes: Collection[Lane]) -> None:
        """Runs the event loop of these lanes to its end. Then it raises what a callback raised.

        If the trainer dies after somebody has asked the run to end (a signal, a callback), the run ends: to start the trainer again would
        train on against that wish."""
        died = ""
        try:
            run_loop(main, self.callbacks.errands if self.callbacks else None)
        except WorkerDied as error:
            if error.who != "trainer" or not self._asked(lanes):
                raise
            died = f" ({error})"
            for lane in lanes:
                lane.session.leave()
        finally:
            self.worked = max((lane.session.worked for lane in lanes), default=0.0)
        if self._asked(lanes) and any(lane.storage.begun and not lane.session.kept for lane in lanes):
            say(
                f"the run has ended without a checkpoint of its last step{died}: headrace train --resume {self.path} "
                "repeats the steps that are in no checkpoint from the journal, and goes on"
            )
        if self.callbacks:
            self.callbacks.raise_error(f"resume it with headrace.train(resume={str(self.path)!r})")

    def _asked(self, lanes: Collection[Lane]) -> bool:
        """Whether somebody has asked the run to end."""
        return any(lane.session.asked for lane in lanes) or (self.callbacks is not None and self.callbacks.stopped)


# --- Calls the user's functions after steps and evaluations
# Calls the user's functions after steps and evaluations, in the user's thread, while the event loop continues.


Stop = Callable[[str, str], None]
"""Called with a sentence for people, and with the reason that the run ends with."""


class Callbacks:
    """A sink. Training continues while a function runs. A function that takes longer than a step is called ever later, but for every step.
    An exception ends the run as Ctrl-C does, with a checkpoint, and is raised after that."""

    def __init__(
        self,
        on_step: Callable[[Step], object] | None = None,
        on_evaluation: Callable[[Evaluation], object] | None = None,
    ) -> None:
        """Raises ConfigError for something that is not callable, or is async."""
        self._on_step = _checked("on_step", on_step)
        self._on_evaluation = _checked("on_evaluation", on_evaluation)
        self.errands: Errands = SimpleQueue()
        self._stops: list[Stop] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stopped = False
        """Whether a function has asked the run to end, or failed."""
        self._error: BaseException | None = None

    def attach(self, stop: Stop) -> None:
        """Called in the event loop, with the function that stops a run."""
        self._loop = asyncio.get_running_loop()
        self._stops.append(stop)

    def record(self, fact: MetricsFact, state: RunState) -> None:
        run = state.started.name if state.started else ""
        if isinstance(fact, StepRow) and self._on_step:
            self.errands.put(partial(self._call, "on_step", self._on_step, Step.of(fact, run)))
        elif isinstance(fact, Evaluated) and self._on_evaluation:
            self.errands.put(partial(self._call, "on_evaluation", self._on_evaluation, Evaluation.of(fact, run)))

    def close(self) -> None:
        """Does nothing: calls that are still queued are made before the run returns."""

    def raise_error(self, remedy: str) -> None:
        """Raises the exception of a user's function, in the user's thread."""
        if self._error is not None:
            self._error.add_note(remedy)
            raise self._error

    def _call(self, name: str, function: Callable[[Any], object], value: Step | Evaluation) -> None:
        if self.stopped:
            return
        try:
            function(value)
        except KeyboardInterrupt:
            raise
        except StopTraining as asked:
            self._stop(f"{name} asked to stop" + (f" ({asked})" if str(asked) else ""), "interrupted")
        except BaseException as error:
            self._error = error
            message = f"{name} raised {one_line(error)}"
            self._stop(message, message)

    def _stop(self, why: str, reason: str) -> None:
        self.stopped = True
        for stop in self._stops:
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(stop, why, reason)
            except RuntimeError:  # closed, because the run has ended
                return


def _checked(name: str, function: Any) -> Any:
    if function is not None and not callable(function):
        raise ConfigError(f"{name} = {function!r} cannot be called; pass a function of one value")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{name} is async; pass a plain function: it runs in your thread, not in the run's event loop"
        )
    return function


# --- run ------------------------------------------------------------


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
    """Trains until the run has ended, with one trainer after the other. What killed one may have taken more with it, such as its node of a
    cluster: what refuses a run at its start is waited for when the run goes on."""
    said, since = "", 0.0
    while True:
        try:
            return _until_it_ends(call)
        except WorkerDied as error:
            if not call.outlives(error):
                raise
            message = f"death no. {call.deaths.counted} of train.max_deaths = {call.deaths.most}"
            say(f"{error}; {message}: the run goes on from its last checkpoint and its journal")
            said = ""
        except ConfigError as error:
            since = since if said else time.monotonic()
            most = call.config.watch.stop_after
            if not call.goes_on or time.monotonic() - since > most:
                raise
            if str(error) != said:
                say(
                    f"the run cannot go on yet: {error}. It is tried again every {AGAIN:g} s, for {most:g} s (watch.stop_after)"
                )
            said = str(error)
            what = f"its next attempt to go on (one every {AGAIN:g} s), since: {said}"
            with shown_waiting(call.path, what, time.monotonic() - since):
                time.sleep(AGAIN)


def _until_it_ends(call: TrainCall) -> RunResult:
    """Trains until the run, or its trainer, has ended. The libraries of its workers are loaded while it is rehearsed."""
    if not runs_here(call.callbacks.errands if call.callbacks else None):
        return _rehearsed_and_trained(call)  # those libraries belong to the thread of the loop, which comes later
    config = call.config
    with libraries_ahead(local_cores(config.orchestration, config.engine, config.train)):
        return _rehearsed_and_trained(call)


def _rehearsed_and_trained(call: TrainCall) -> RunResult:
    inputs, resume = call.inputs, call.resume
    config = begins_with(call.config.with_commits(call.config.chosen.models), resume) if resume else call.config
    rehearsed = None if resume else complete(rehearse(config, inputs, measurer=call.measurer))
    config = rehearsed.config if rehearsed else config
    with full_disk_as_error(call.path), RunDirectory.of(call.path, bool(resume)) as directory:
        if rehearsed and rehearsed.demonstrations:
            config = warmed(config, rehearsed.demonstrations, rehearsed.tried, directory)
            call.begun = True
        with open_lanes(config, directory, bool(resume)) as lanes:
            if all(lane.finished for lane in lanes.values()):
                report_finished(directory.path, list(lanes.values()))
                return result_of(directory.path, lanes)
            try:
                # A resumed run only now, since a finished one needs no rehearsal. Its directory is still unchanged.
                if rehearsed is None:
                    rehearsed = complete(rehearse(config, inputs, resume))
                for lane in lanes.values():
                    for fact in [*_warm_facts(lane), *rehearsed.facts(lane.storage.seconds)]:
                        lane.storage.recorder.record(fact)
                shown = call.begun or call.goes_on or not resume
                with _watchdog(config.watch, directory, writes=shown) as watchdog:
                    running = _RunningLanes(call, config, directory, lanes, watchdog)
                    call.run_loop(partial(running.run, rehearsed.tried), lanes.values())
            except HeadraceError as error:
                if alone := lanes.get(""):
                    alone.add_resume_hint(error)
                raise
        report_unbegun(lanes.values())
        return result_of(directory.path, lanes)


def _warm_facts(lane: Lane) -> list[WarmStarted]:
    """The warm start that the run has begun with, if its metrics have none."""
    known = lane.storage.recorder.state.warm or not lane.config.warm_start.path
    done = None if known else warm_started(lane.directory.path)
    return [done] if done else []


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
