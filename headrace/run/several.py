"""Trains several adapters at once on one base: one trainer, one engine, and a pipeline for each adapter.

    runs/<name>/             config.toml, logs/ of the two processes
    runs/<name>/<adapter>/   the directory of a run: config.toml, metrics, journal, checkpoints, report

The pipelines share only the two processes. The trainer serves calls in the order in which they arrive, and each pipeline makes one call
at a time, so the steps of different adapters take turns. The engine serves the requests of all adapters in one batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.durable.atomic_files import full_disk_as_error
from headrace.facts.telemetry import Telemetry
from headrace.models.chat import open_model
from headrace.processes.health.watchdog import Watchdog
from headrace.run.build import BuiltRun, Pools, PreparedRun, TriedParts, join, open_telemetry, prepare
from headrace.run.config import RunConfig, adapter_runs, config_of_run, dump_config, read_config
from headrace.run.hosting import Heed, complete
from headrace.run.lane import Lane, open_lane, report_finished, report_unbegun
from headrace.run.pools import open_pools
from headrace.run.rehearse import rehearse
from headrace.run.resume_rules import check_resumable, meaning
from headrace.run.run_directory import CONFIG, RunDirectory
from headrace.run.session import Notices, report_unhandled, run_clock
from headrace.run.train_call import TrainCall
from headrace.run.user_sites import user_sites
from headrace.views.screen.board import Board, open_board


def train_together(call: TrainCall) -> dict[str, Lane]:
    """Trains all adapters to their last step. If one fails, the others stop with a checkpoint, and its error is raised."""
    config, inputs, resume = call.config, call.inputs, call.resume
    rehearsed = None if resume else complete(rehearse(config, inputs, measurer=call.measurer))
    config = rehearsed.config if rehearsed else config
    with full_disk_as_error(call.path), ExitStack() as undo:
        directory = undo.enter_context(RunDirectory.of(call.path, bool(resume)))
        if resume:
            check_resumable(meaning(read_config(config_of_run(resume))), meaning(config))
        board = undo.enter_context(open_board(config.observe, [one.name for one in config.adapters]))
        lanes = {}
        for run in adapter_runs(config):
            own = undo.enter_context(_directory(directory.path / run.name, bool(resume)))
            lanes[run.name] = _open(run, own, bool(resume) and own.begun, board)
            undo.callback(lanes[run.name].close)
        undo.callback(board.close)  # so that the summaries are printed below it
        if all(lane.finished for lane in lanes.values()):
            report_finished(directory.path, list(lanes.values()))
            return lanes
        if rehearsed is None:
            rehearsed = complete(rehearse(config, inputs, resume))
        for lane in lanes.values():
            for fact in rehearsed.facts(lane.storage.seconds):
                lane.storage.recorder.record(fact)
        watchdog = Watchdog(
            directory.logs, warn_after=config.watch.warn_after, stop_after=config.watch.stop_after, writes=not resume
        )
        with watchdog:
            together = _SeveralRuns(
                call,
                config=config,
                directory=directory,
                lanes=lanes,
                watchdog=watchdog,
                tried=rehearsed.tried,
            )
            call.host(together.run, lanes.values())
        report_unbegun(lanes.values())
        return lanes


def _directory(path: Path, resume: bool) -> RunDirectory:
    """An adapter's directory. It may be missing in a resumed run that was killed at its start."""
    return RunDirectory.of(path, resume and (path / CONFIG).exists())


def _open(config: RunConfig, directory: RunDirectory, resume: bool, board: Board) -> Lane:
    """Opens an adapter's lane. Its terminal view is one part of the board that shows all adapters."""
    silent = dataclasses.replace(config, observe=dataclasses.replace(config.observe, terminal="off"))
    lane = open_lane(silent, directory, resume)
    lane.storage.recorder.add(board.lane(config.name))
    return lane


async def _serve_base(pools: Pools, telemetry: Telemetry) -> None:
    async with telemetry.waits.named("start", "the base weights to be live"):
        await pools.serve_base(telemetry)


async def _close(pools: Pools, telemetry: Telemetry) -> None:
    async with telemetry.waits.named("closing", "the worker processes"):
        await pools.close()


class _AllRecorders:
    """Records facts about the two shared processes in every pipeline's recorder."""

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = lanes

    def record(self, fact: Any) -> None:
        for lane in self._lanes.values():
            lane.storage.recorder.record(fact)


class _SeveralRuns:
    def __init__(
        self,
        call: TrainCall,
        *,
        config: RunConfig,
        directory: RunDirectory,
        lanes: Mapping[str, Lane],
        watchdog: Watchdog,
        tried: Mapping[str, TriedParts],
    ) -> None:
        """`tried`: what a rehearsal has loaded for each adapter."""
        self._tried = tried
        self._call, self._config, self._directory, self._lanes = call, config, directory, lanes
        self._watchdog, self._callbacks = watchdog, call.callbacks
        self._loading: asyncio.Task[Any] | None = None
        """The task that loads. None once the pipelines run: an interrupt then goes to each of them."""

    async def run(self, on_signal: Callable[[Heed], None]) -> None:
        self._loading = asyncio.current_task()
        on_signal(Notices(self._interrupt, self._config.orchestration.grace).hear)
        try:
            await self._run()
        except asyncio.CancelledError:
            for lane in self._lanes.values():
                lane.session.reason = "interrupted"

    async def _run(self) -> None:
        clock = run_clock(max(lane.storage.seconds for lane in self._lanes.values()))
        telemetry = open_telemetry(self._config, _AllRecorders(self._lanes), clock)
        report_unhandled(telemetry.warn)
        for lane in self._lanes.values():
            self._watchdog.add(lane.directory.path, telemetry.waits)
            lane.storage.recorder.add(self._watchdog)
            if self._callbacks:
                self._callbacks.attach(lane.session.stop)
                lane.storage.recorder.add(self._callbacks)
        self._watchdog.attach()
        async with AsyncExitStack() as undo:
            prepared, sites = {}, user_sites(self._config, telemetry)
            async with telemetry.waits.named("start", "the files of models, tasks and rewards", endless=True):
                model_dir, encoder = await open_model(self._config.model.path)
                for name, lane in self._lanes.items():
                    prepared[name] = await prepare(
                        lane.config,
                        model_dir,
                        encoder,
                        inputs=self._call.inputs,
                        logs=lane.directory.logs,
                        telemetry=dataclasses.replace(telemetry, record=lane.storage.recorder.record),
                        sites=sites,
                        tried=self._tried.get(name),
                    )
                    undo.push_async_callback(prepared[name].scorer.close)
                    undo.push_async_callback(prepared[name].environment.close)
            restore = {name: at for name, lane in self._lanes.items() if (at := lane.storage.checkpoint)}
            logs = self._directory.logs
            pools = await open_pools(self._config, model_dir, logs, telemetry, restore, sites=sites)
            undo.push_async_callback(_close, pools, telemetry)
            first = next(iter(self._lanes.values())).storage.recorder  # one record of the base weights is enough
            await _serve_base(pools, dataclasses.replace(telemetry, record=first.record))
            built = await self._begin(prepared, pools, clock)
            self._loading = None
            await self._train(built)

    async def _begin(
        self, prepared: Mapping[str, PreparedRun], pools: Pools, clock: Callable[[], float]
    ) -> dict[str, BuiltRun]:
        """Begins all pipelines, but only after each of them has been joined: else one that is refused would leave changed directories."""
        async with AsyncExitStack() as undo:
            joined = {}
            for name, lane in self._lanes.items():
                telemetry = open_telemetry(lane.config, lane.storage.recorder, clock)
                self._watchdog.add(lane.directory.path, telemetry.waits)
                lent = pools.lend()
                undo.push_async_callback(lent.close)
                joined[name] = await join(
                    lane.config, prepared[name], pools=lent, adapter=name, storage=lane.storage, telemetry=telemetry
                )
            built = {name: begin() for name, begin in joined.items()}
            self._keep_settings()
            undo.pop_all()
        return built

    def _keep_settings(self) -> None:
        settings = dump_config(self._config)
        if self._call.resume:
            self._directory.keep_config(settings, step=0)
        else:
            self._directory.begin(settings)
        self._call.begun = True

    async def _train(self, built: Mapping[str, BuiltRun]) -> None:
        running = {
            asyncio.ensure_future(lane.session.run(_ready(built[name]))): name for name, lane in self._lanes.items()
        }
        done, others = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in done if not task.cancelled() and task.exception()]
        if not failed:
            return
        name, error = running[failed[0]], failed[0].exception()
        assert error is not None
        for task in others:
            self._lanes[running[task]].session.interrupt(f"the adapter {name} failed ({error})", again="", asked=False)
        await asyncio.gather(*others, return_exceptions=True)  # only the first error is raised
        if isinstance(error, HeadraceError):
            error.add_note(
                f"it was the adapter {name}; resume the run with: headrace train --resume {self._directory.path}"
            )
        raise error

    def _interrupt(self, why: str, again: str) -> None:
        if self._loading:
            self._loading.cancel()
            self._loading = None
        for lane in self._lanes.values():
            lane.session.interrupt(why, again)


async def _ready(built: BuiltRun) -> BuiltRun:
    return built
