"""The course of one pipeline: its first weights, evaluation before and after training, interrupts, and the summary at the end."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.algo.noise import inside_rounding
from headrace.core.errors import HeadraceError, StalledError, WorkerDied
from headrace.core.printing import say
from headrace.durable.journal import JournalStep
from headrace.facts.facts import Books, Evaluated, RunEnded, RunStarted
from headrace.facts.verdicts import at_the_end, ends_of
from headrace.loop.assembly import go_live
from headrace.loop.pipeline import Parts, Pipeline
from headrace.loop.turns import LAST_WORD, Utilisation
from headrace.native.arithmetic import machine_mark
from headrace.run.config import RunConfig
from headrace.run.pools import Pools, close_within
from headrace.run.run_directory import Storage
from headrace.run.teaching import Teaching
from headrace.run.wording import headline, machine_change, placement, weight_way

PATIENCE = {0: LAST_WORD, 1: 5.0}
"""Seconds in which the engine should answer after training, by the number of interrupts: whoever pressed Ctrl-C waits."""


def run_clock(age: float) -> Callable[[], float]:
    """A clock that returns the seconds since the start of a run. `age`: the age of the run now, in seconds."""
    loop = asyncio.get_running_loop()
    origin = loop.time() - age
    return lambda: loop.time() - origin


def report_unhandled(say: Callable[[str], None]) -> None:
    """Reports exceptions that nobody can catch (in a callback, in a task that nobody awaits) to `say`, beside logging them.

    They do not end the run: headrace's own background tasks have sentinels for that, and this task may belong to a reward function."""

    def heard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)  # the traceback, for the log
        say(f"{context['message']}: {context['exception']!r}" if "exception" in context else context["message"])

    asyncio.get_running_loop().set_exception_handler(heard)


@dataclass(kw_only=True)
class BuiltRun:
    """A lane that has begun: its pipeline is assembled, and its processes are up."""

    config: RunConfig
    adapter: str
    """The adapter that is trained; empty if the engine serves full weights."""
    pools: Pools
    teaching: Teaching
    parts: Parts
    pipeline: Pipeline
    redo: Sequence[JournalStep]
    """The steps after the checkpoint, which the trainer must repeat before anything else."""
    outdated: Mapping[int, Sequence[str]]
    """See `SavedRun.outdated`."""
    utilisation: Utilisation
    close: Callable[[], Awaitable[None]]
    """Closes what is the lane's own: all but the pools."""

    def started(self, step: int) -> RunStarted:
        """`step`: number of optimizer steps done."""
        config, buffer = self.config, self.parts.buffer
        books = Books(buffer.accounting(), tuple(buffer.in_flight), buffer.ready)
        return RunStarted(
            t=self.parts.telemetry.clock(),
            name=config.name,
            headline=headline(config),
            seed=config.seed,
            steps=config.train.steps,
            groups_per_step=config.staleness.groups_per_step,
            group_size=config.rollout.group_size,
            slots=config.staleness.generating,
            window=config.staleness.window,
            max_lag=config.staleness.lag_bound,
            where=placement(config, self.pools.engine.capabilities.path),
            resumed_at=step,
            books=books,
            machine=machine_mark(config.train.cores, config.train.threads),
            max_tokens=config.rollout.max_tokens,
            chosen=config.chosen.why,
            prices=config.observe.prices,
            weights=weight_way(config.way, config.weight_sync.encoding),
        )

    async def go_live(self) -> None:
        """Publishes the trainer's weights, loads them into the engine, and proves that they are the same (C3)."""
        telemetry = self.parts.telemetry
        serve_base = partial(self.pools.serve_base, telemetry) if self.adapter else None
        rounding = await go_live(self.parts, self.adapter, serve_base)
        for sentence in inside_rounding(self.config.algo, rounding, self.config.rollout.max_tokens):
            telemetry.warn(sentence)
        if self.config.orchestration.placement != "shared" and not self.config.orchestration.lend:  # there it may sleep
            self.pools.reserve()

    def kill(self) -> None:
        """Kills the processes instead of asking them to end. They must still be closed."""
        self.pools.kill()
        self.teaching.kill()


class Notices:
    """Turns the signals that reach a run into interrupts: Ctrl-C into one each, SIGTERM into one, and one more when its time is over."""

    def __init__(self, interrupt: Callable[[str, str], object], grace: float) -> None:
        """`interrupt`: see `Session.interrupt`. `grace`: seconds after SIGTERM in which the run should end with a checkpoint."""
        self._interrupt, self._grace = interrupt, grace
        self._asked = self._terminated = False

    def hear(self, number: signal.Signals) -> None:
        """Called in the event loop."""
        if number != signal.SIGTERM:
            self._asked = True
            self._interrupt("interrupted", " (Ctrl-C again: leave now)")
            return
        if self._terminated:  # whoever sends it to a process often sends it to its group too
            return
        self._terminated = True
        within = f"{self._grace:g} s (orchestration.grace)"
        self._tell(f"SIGTERM: the run ends after this step, with a checkpoint, or without one in {within}")
        asyncio.get_running_loop().call_later(self._grace, self._late)
        if not self._asked:
            self._interrupt("SIGTERM", f" within {within}")

    def _late(self) -> None:
        self._tell(f"SIGTERM was sent {self._grace:g} s ago (orchestration.grace): leaving now")
        self._interrupt("SIGTERM", "")

    def _tell(self, message: str) -> None:
        say(message)


class Session:
    """The life of one pipeline in this process, from its parts to their end, whatever ends it."""

    def __init__(self, storage: Storage) -> None:
        self._recorder, self._saved = storage.recorder, storage.saved
        self.reason, self.step = "finished", self._saved.step if self._saved else 0
        self.before: Evaluated | None = None
        self.after: Evaluated | None = None
        self._built: BuiltRun | None = None
        self._training = self._trained = False
        self.over = False
        """Whether the pipeline has ended. What it has left behind may still be closing."""
        self._interrupts, self._left_for = 0, "interrupted"
        self.asked = False
        """Whether somebody outside the run has asked it to end."""
        self.kept = False
        """Whether there is a checkpoint of the last step."""
        self._main: asyncio.Task[Any] | None = None

    @property
    def worked(self) -> float:
        """Seconds from the beginning of training to the last step that was done."""
        return self._built.pipeline.worked if self._built else 0.0

    def recall(self) -> None:
        """Takes the evaluations of a finished run from its metrics."""
        state = self._recorder.state
        self.before, self.after = ends_of(state.evals)[0], at_the_end(state)

    def loads(self) -> None:
        """Called in the task that loads the run: an interrupt then cancels it."""
        self._main = asyncio.current_task()

    def start(self, built: BuiltRun) -> asyncio.Task[None]:
        """Begins to train, and returns the task that ends with the run."""
        self._built = built
        self._main = asyncio.ensure_future(self._run(built))
        return self._main

    async def _run(self, built: BuiltRun) -> None:
        try:
            await self._train(built)
        except Exception as error:
            left = self.asked and isinstance(error, WorkerDied) and error.who == "trainer"  # see `TrainCall.run_loop`
            self.reason = self._left_for if left else str(error) if isinstance(error, HeadraceError) else repr(error)
            raise
        except asyncio.CancelledError:
            self.reason = self._left_for
        finally:
            self.over = True
            if self._interrupts > 1:
                built.kill()
            with suppress(HeadraceError):  # a full disk must not hide the error that ended the run
                self._recorder.record(await self._ended(built))
            await close_within(built.parts.telemetry.waits, built.close())

    async def _train(self, built: BuiltRun) -> None:
        await self._redo(built)
        earlier, started = self._recorder.state.started, built.started(built.pipeline.step)
        self._recorder.record(started)
        if earlier and (message := machine_change(earlier, started)):
            built.parts.telemetry.warn(message)
        await built.go_live()
        if not self._recorder.state.evals and built.pipeline.step == 0:
            self.before = await built.parts.evaluator.measure("before", 0)
        for evaluation in self._recorder.state.evals:
            built.parts.minutes.measured(evaluation=evaluation.seconds)
        await built.utilisation.start()
        self._training, patience = True, math.inf
        try:
            await built.pipeline.run()
        except StalledError:  # something has waited long enough: most often for the engine
            patience = 0.0
            raise
        finally:
            self._training, self._trained, self.step = False, True, built.pipeline.step
            await built.utilisation.stop(min(patience, PATIENCE.get(self._interrupts, 0.0)))
        if built.pipeline.interrupted:
            self.reason = self._left_for
        else:
            self.after = await built.parts.evaluator.measure("after", self.step)

    async def _redo(self, built: BuiltRun) -> None:
        """Repeats journaled steps, which brings the trainer to the moment of the kill too."""
        built.pipeline.discard(built.outdated)
        if not built.redo:
            return
        first, last = built.redo[0].step, built.redo[-1].step
        message = f"steps {first} to {last} are repeated from the journal: they were done after the checkpoint"
        built.parts.telemetry.warn(message)
        await built.pipeline.redo(built.redo)

    def interrupt(self, why: str, again: str, *, asked: bool = True) -> None:
        """The first call ends the run after the current step, with a checkpoint. The second one ends it at once. `asked`: whether somebody
        outside the run wants it."""
        self._interrupts += 1
        self.asked = self.asked or asked
        if self._interrupts == 1 and self._training and self._built:
            message = f"{why}: finishing this step, writing a checkpoint{again}"
            self._built.parts.telemetry.warn(message)
            self._built.pipeline.interrupt()
        elif self._main and not self.over:
            self._main.cancel()

    def stop(self, why: str, reason: str) -> None:
        """Ends the run as the first interrupt does. Does nothing if training is over already: the run then ends as usual."""
        if not self._interrupts and not self._trained:
            self._left_for = reason
            self.interrupt(why, again="")

    def leave(self) -> None:
        """Notes that the pipeline has ended because it was asked to, though not with a checkpoint. Does nothing if it was finished."""
        if self.reason != "finished" or not self._trained:
            self.reason = self._left_for

    async def _ended(self, built: BuiltRun) -> RunEnded:
        self.kept = saved = built.parts.snapshots.saved_step == built.pipeline.step
        return RunEnded(
            t=built.parts.telemetry.clock(),
            reason=self.reason,
            step=built.pipeline.step,
            accounting=built.parts.buffer.accounting(in_checkpoint=saved),
            engine_idle=built.utilisation.engine_idle,
            trainer_idle=built.utilisation.trainer_idle,
            prompt_tokens=built.utilisation.prompt_tokens,
            sampled_tokens=built.utilisation.sampled_tokens,
        )
