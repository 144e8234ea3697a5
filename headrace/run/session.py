"""The course of one pipeline: evaluation before and after training, interrupts, and the summary at the end."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from headrace.core.errors import HeadraceError, StalledError, WorkerDied
from headrace.core.printing import say
from headrace.facts.facts import Evaluated, RunEnded
from headrace.loop.utilisation import LAST_WORD
from headrace.run.build import BuiltRun
from headrace.run.storage import Storage
from headrace.run.wording import machine_change

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

    def _tell(self, said: str) -> None:
        say(said)


class Session:
    """The life of one pipeline in this process, from its parts to their end, whatever ends it."""

    def __init__(self, storage: Storage) -> None:
        self._recorder, self._saved = storage.recorder, storage.saved
        self.reason, self.step = "finished", self._saved.step if self._saved else 0
        self.before: Evaluated | None = None
        self.after: Evaluated | None = None
        self._built: BuiltRun | None = None
        self._training = self._trained = self._leaving = False
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
        known = {one.phase: one for one in self._recorder.state.evals}
        self.before, self.after = known.get("before"), known.get("after")

    async def run(self, building: Awaitable[BuiltRun]) -> None:
        self._main = asyncio.current_task()
        try:
            self._built = await building
            await self._train(self._built)
        except Exception as error:
            left = self.asked and isinstance(error, WorkerDied) and error.who == "trainer"  # see `TrainCall.host`
            self.reason = self._left_for if left else str(error) if isinstance(error, HeadraceError) else repr(error)
            raise
        except asyncio.CancelledError:
            self.reason = self._left_for
        finally:
            self._leaving = True
            if self._built:
                if self._interrupts > 1:
                    self._built.pools.kill()
                with suppress(HeadraceError):  # a full disk must not hide the error that ended the run
                    self._recorder.record(await self._ended(self._built))
                await self._close(self._built)

    async def _train(self, built: BuiltRun) -> None:
        await self._redo(built)
        earlier, started = self._recorder.state.started, built.started(built.pipeline.step)
        self._recorder.record(started)
        if earlier and (said := machine_change(earlier, started)):
            built.parts.telemetry.warn(said)
        await built.go_live()
        if not self._recorder.state.evals and built.pipeline.step == 0:
            self.before = await built.parts.evaluator.measure("before", 0)
        for one in self._recorder.state.evals:
            built.parts.minutes.measured(evaluation=one.seconds)
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

    async def _close(self, built: BuiltRun) -> None:
        try:
            async with built.parts.telemetry.waits.named("closing", "the worker processes"):
                await built.close()
        except StalledError as error:  # nor may a process that cannot be killed
            say(error)

    async def _redo(self, built: BuiltRun) -> None:
        """Repeats journaled steps, which brings the trainer to the moment of the kill too."""
        built.pipeline.discard(built.outdated)
        if not built.redo:
            return
        first, last = built.redo[0].step, built.redo[-1].step
        said = f"steps {first} to {last} are repeated from the journal: they were done after the checkpoint"
        built.parts.telemetry.warn(said)
        await built.pipeline.redo(built.redo)

    def interrupt(self, why: str, again: str, *, asked: bool = True) -> None:
        """The first call ends the run after the current step, with a checkpoint. The second one ends it at once. `asked`: whether somebody
        outside the run wants it."""
        self._interrupts += 1
        self.asked = self.asked or asked
        if self._interrupts == 1 and self._training and self._built:
            said = f"{why}: finishing this step, writing a checkpoint{again}"
            self._built.parts.telemetry.warn(said)
            self._built.pipeline.interrupt()
        elif self._leaving and self._built:
            self._built.pools.kill()
        elif self._main:
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
