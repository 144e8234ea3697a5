"""A whole run, from a config to a report: what `headrace train` and `headrace.train` do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.config import RunConfig
from headrace.errors import HeadraceError
from headrace.observe.watchdog import Watchdog
from headrace.orchestration.build import build, open_waits
from headrace.orchestration.callbacks import Callbacks
from headrace.orchestration.handed import NOTHING, Handed
from headrace.orchestration.hosting import Act, host
from headrace.orchestration.lane import Lane, open_lane
from headrace.orchestration.result import RunResult, result_of
from headrace.orchestration.rundir import RunDirectory
from headrace.orchestration.session import run_clock
from headrace.orchestration.several import train_together


def train(
    config: RunConfig, resume: Path | None = None, handed: Handed = NOTHING, callbacks: Callbacks | None = None
) -> RunResult:
    """Train to the end, an interrupt or an error; in each case with a summary, a report, and a checkpoint if there is one.

    `resume`: the directory of the run to go on with; its newest good checkpoint is used.
    `handed`: functions and rows that the settings name but cannot hold. `callbacks` are called in this thread.
    Raises `HeadraceError` with one sentence when the run could not be finished, and what a callback raised.
    """
    if config.adapters:
        lanes = train_together(config, handed, resume, callbacks)
        return result_of(resume or config.run_dir, lanes)
    with RunDirectory.of(resume or config.run_dir, config, bool(resume)) as directory:
        lane = open_lane(config, directory, bool(resume))
        try:
            _train(lane, handed, callbacks)
        except HeadraceError as error:
            lane.say_how_to_go_on(error)
            raise
        finally:
            lane.close()
        return result_of(directory.path, {"": lane})


def _train(lane: Lane, handed: Handed, callbacks: Callbacks | None) -> None:
    config, directory, storage = lane.config, lane.directory, lane.storage
    watchdog = Watchdog(directory.logs, config.watch.warn_after, config.watch.stop_after)
    storage.recorder.add(watchdog)
    if callbacks:
        storage.recorder.add(callbacks)

    async def go(on_interrupt: Callable[[Act], None]) -> None:
        clock = run_clock(storage.seconds)
        on_interrupt(lane.session.interrupt)
        if callbacks:
            callbacks.attach(lane.session.stop)
        waits = open_waits(config, storage.recorder, clock)
        watchdog.add(directory.path, waits)
        watchdog.attach()
        await lane.session.run(build(config, directory.logs, storage, handed, waits, clock))

    with watchdog:
        host(go, callbacks.errands if callbacks else None)
    if callbacks:
        callbacks.raise_error(f"go on with headrace.train(resume={str(directory.path)!r})")
