"""A whole run, from a config to a report: what `headrace train` and `headrace.train` do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.errors import HeadraceError
from headrace.observe.facts import Evaluated, Warned
from headrace.observe.files import full_disk_is_said
from headrace.observe.watchdog import Watchdog
from headrace.orchestration.build import build, open_waits
from headrace.orchestration.lane import Lane, open_lane, say_finished
from headrace.orchestration.rehearse import rehearse
from headrace.orchestration.rundir import RunDirectory
from headrace.orchestration.session import on_interrupt, on_unheard, run_clock
from headrace.orchestration.several import train_together

Reward = Callable[..., Any]


@dataclass(frozen=True)
class RunResult:
    """What a run came to. `reason` is `finished` or `interrupted`; `report` is an HTML file."""

    directory: Path
    reason: str
    step: int
    before: Evaluated | None
    after: Evaluated | None
    report: Path
    adapters: dict[str, RunResult] = field(default_factory=dict)
    """Where several were trained: what each came to. The rest is then that of the first."""


def train(config: RunConfig, reward: Reward | None = None, resume: Path | None = None) -> RunResult:
    """Train to the end, an interrupt or an error; in each case with a summary, a report, and a checkpoint if there is one.

    `reward`: a function of prompts, completions and the row's other columns, in place of `config.reward`.
    `resume`: the directory of the run to go on with; its newest good checkpoint is used.
    Raises `HeadraceError` with one sentence when the run could not be finished. What can be known to be wrong before a model is
    loaded is a `ConfigError`, and nothing has been written then.
    """
    if config.adapters:
        lanes = train_together(config, reward, resume)
        results = {name: _result(lane) for name, lane in lanes.items()}
        first = next(iter(results.values()))
        path = resume or config.run_dir
        return RunResult(path, first.reason, first.step, first.before, first.after, first.report, results)
    notes = [] if resume else asyncio.run(rehearse(config, reward)).notes
    with (
        full_disk_is_said(resume or config.run_dir),
        RunDirectory.of(resume or config.run_dir, bool(resume)) as directory,
    ):
        lane = open_lane(config, directory, bool(resume))
        if lane.finished:
            say_finished(directory.path, [lane])
            return _result(lane)
        watchdog = Watchdog(directory.logs, config.watch.warn_after, config.watch.stop_after, tells=not resume)
        lane.storage.recorder.add(watchdog)

        async def go() -> None:
            clock = run_clock(lane.storage.seconds)
            on_interrupt(lane.session.interrupt)
            on_unheard(lambda said: lane.storage.recorder.record(Warned(clock(), said)))
            waits = open_waits(config, lane.storage.recorder, clock)
            watchdog.add(directory.path, waits)
            watchdog.attach()
            await lane.session.run(build(config, directory.logs, lane.storage, reward, waits, clock))

        try:
            if resume:  # whether it is finished had to be known first; nothing of it has been changed yet
                notes = asyncio.run(rehearse(config, reward, resume)).notes
            for note in notes:
                lane.storage.recorder.record(Warned(lane.storage.seconds, note))
            with watchdog:
                asyncio.run(go())
        except HeadraceError as error:
            lane.say_how_to_go_on(error)
            raise
        finally:
            lane.close()
        return _result(lane)


def _result(lane: Lane) -> RunResult:
    session = lane.session
    return RunResult(lane.directory.path, session.reason, session.step, session.before, session.after, lane.report)
