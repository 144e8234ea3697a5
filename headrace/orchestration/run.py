"""A whole run, from a config to a report: what `headrace train` and `headrace.train` do."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RunConfig, check_resumable, config_of_run, dump_config, read_config
from headrace.errors import CheckpointError, HeadraceError
from headrace.observe.build import open_recorder
from headrace.observe.facts import Evaluated, RunEnded, Warned
from headrace.observe.recorder import Recorder
from headrace.observe.report import write_report
from headrace.observe.summary import print_summary
from headrace.orchestration.build import Built, build
from headrace.orchestration.checkpoint import Checkpoints
from headrace.orchestration.rundir import RunDirectory
from headrace.orchestration.snapshots import ControllerState, load_controller

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


def train(config: RunConfig, reward: Reward | None = None, resume: Path | None = None) -> RunResult:
    """Train to the end, an interrupt or an error; in each case with a summary, a report, and a checkpoint if there is one.

    `reward`: a function of prompts, completions and the row's other columns, in place of `config.reward`.
    `resume`: the directory of the run to go on with; its newest good checkpoint is used.
    Raises `HeadraceError` with one sentence when the run could not be finished.
    """
    path = resume or Path(config.out) / config.name
    with RunDirectory.reopen(path) if resume else RunDirectory.create(path, dump_config(config)) as directory:
        checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
        checkpoint, complaints = _restore_point(checkpoints) if resume else (None, [])
        state = load_controller(checkpoint) if checkpoint else None
        if resume:
            check_resumable(read_config(config_of_run(path)), config)
            directory.keep_config(dump_config(config), state.step if state else 0)
        recorder = open_recorder(config.observe, path, (state.step if state else 0) if resume else None)
        for complaint in [*complaints, *config.algo.caveats(config.rollout.max_tokens)]:
            recorder.record(Warned(state.seconds if state else 0.0, complaint))
        session = _Session(config, directory, recorder, checkpoints, checkpoint, state, reward)
        try:
            asyncio.run(session.run())
        except HeadraceError as error:
            if last := checkpoints.all():
                error.add_note(f"go on from {last[-1].name} with: headrace train --resume {path}")
            raise
        finally:
            report = _close(recorder, path)
        return RunResult(path, session.reason, session.step, session.before, session.after, report)


def _close(recorder: Recorder, path: Path) -> Path:
    """The report on disk and the summary on the terminal, however the run ended."""
    recorder.close()
    report = path / "report.html"
    with suppress(OSError, HeadraceError):  # nor may they hide it
        report = write_report(path)
    if recorder.state.started:
        print_summary(recorder.state, report)
    return report


def _restore_point(checkpoints: Checkpoints) -> tuple[Path | None, list[str]]:
    """The newest good checkpoint, and what to tell the user about it."""
    checkpoint, complaints = checkpoints.newest_good()
    if checkpoint:
        return checkpoint, [f"{complaint}; {checkpoint.name} is used instead" for complaint in complaints]
    if complaints:
        raise CheckpointError("; ".join(complaints) + ". No older checkpoint is whole: start the run again")
    return None, ["no checkpoint had been written: the run starts over from its config"]


class _Session:
    """One process's share of a run: from opening the workers to closing them."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        recorder: Recorder,
        checkpoints: Checkpoints,
        checkpoint: Path | None,
        state: ControllerState | None,
        reward: Reward | None,
    ) -> None:
        self._config, self._directory, self._recorder = config, directory, recorder
        self._checkpoints, self._checkpoint, self._state, self._reward = checkpoints, checkpoint, state, reward
        self.reason, self.step = "finished", state.step if state else 0
        self.before: Evaluated | None = None
        self.after: Evaluated | None = None
        self._built: Built | None = None
        self._training = self._leaving = False
        self._interrupts = 0
        self._main: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        origin = loop.time() - (self._state.seconds if self._state else 0.0)
        with suppress(NotImplementedError, ValueError, RuntimeError):  # outside the main thread Ctrl-C is the caller's
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            self._built = await build(
                self._config,
                self._directory.logs,
                self._recorder,
                self._checkpoints,
                self._checkpoint,
                self._state,
                self._reward,
                lambda: loop.time() - origin,
            )
            await self._train(self._built)
        except Exception as error:
            self.reason = str(error) if isinstance(error, HeadraceError) else repr(error)
            raise
        except asyncio.CancelledError:
            self.reason = "interrupted"
        finally:
            self._leaving = True
            if self._built:
                if self._interrupts > 1:
                    self._built.pools.kill()
                with suppress(HeadraceError):  # a disk that is full now must not hide what ended the run
                    self._recorder.record(await self._ended(self._built))
                await self._built.close()

    async def _train(self, built: Built) -> None:
        self._recorder.record(built.started)
        await built.go_live()
        if self._state is None:
            self.before = await built.parts.evaluator.measure("before", 0)
        await built.utilisation.start()
        self._training = True
        try:
            await built.pipeline.run()
        finally:
            self._training, self.step = False, built.pipeline.step
            await built.utilisation.stop()
        if built.pipeline.interrupted:
            self.reason = "interrupted"
        else:
            self.after = await built.parts.evaluator.measure("after", self.step)

    def _interrupt(self) -> None:
        """Ctrl-C once: a checkpoint at the next step's end, then leave. Twice: leave now."""
        self._interrupts += 1
        if self._interrupts == 1 and self._training and self._built:
            self._recorder.record(
                Warned(
                    self._built.clock(),
                    "interrupted: finishing this step, writing a checkpoint (Ctrl-C again: leave now)",
                )
            )
            self._built.pipeline.interrupt()
        elif self._leaving and self._built:
            self._built.pools.kill()
        elif self._main:
            self._main.cancel()

    async def _ended(self, built: Built) -> RunEnded:
        saved = built.parts.snapshots.saved_step == built.pipeline.step
        return RunEnded(
            built.clock(),
            self.reason,
            built.pipeline.step,
            built.parts.buffer.accounting(in_checkpoint=saved),
            built.utilisation.engine_idle,
            built.utilisation.trainer_idle(built.pipeline.trainer_busy),
            built.utilisation.prompt_tokens,
            built.utilisation.sampled_tokens,
        )
