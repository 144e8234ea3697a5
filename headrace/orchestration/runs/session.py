"""From a pipeline's parts to its end: what is measured before and after, what an interrupt does, what is told at the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from headrace.errors import HeadraceError, StalledError
from headrace.observe.facts import Evaluated, RunEnded, Warned
from headrace.orchestration.build import BuiltRun
from headrace.orchestration.loops.utilisation import LAST_WORD
from headrace.orchestration.store.storage import Storage
from headrace.orchestration.wording import machine_change


def run_clock(age: float) -> Callable[[], float]:
    """Seconds since the start of a run that is `age` seconds old now."""
    loop = asyncio.get_running_loop()
    origin = loop.time() - age
    return lambda: loop.time() - origin


def report_unhandled(say: Callable[[str], None]) -> None:
    """What goes wrong where nobody can catch it (a callback, a task that nobody awaits) is said, and not only logged.

    It does not end the run: each background task of headrace has a sentinel that does, and this may be one of a reward function."""

    def heard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)  # the traceback, for the log
        say(f"{context['message']}: {context['exception']!r}" if "exception" in context else context["message"])

    asyncio.get_running_loop().set_exception_handler(heard)


class Session:
    """One process's share of one pipeline's run: from its parts to their end, whatever ends it."""

    def __init__(self, storage: Storage) -> None:
        self._recorder, self._saved = storage.recorder, storage.saved
        self.reason, self.step = "finished", self._saved.step if self._saved else 0
        self.before: Evaluated | None = None
        self.after: Evaluated | None = None
        self._built: BuiltRun | None = None
        self._training = self._trained = self._leaving = False
        self._interrupts, self._left_for = 0, "interrupted"
        self._main: asyncio.Task[Any] | None = None

    def recall(self) -> None:
        """What an earlier process measured, of a run that is over."""
        known = {one.phase: one for one in self._recorder.state.evals}
        self.before, self.after = known.get("before"), known.get("after")

    async def run(self, building: Awaitable[BuiltRun]) -> None:
        self._main = asyncio.current_task()
        try:
            self._built = await building
            await self._train(self._built)
        except Exception as error:
            self.reason = str(error) if isinstance(error, HeadraceError) else repr(error)
            raise
        except asyncio.CancelledError:
            self.reason = self._left_for
        finally:
            self._leaving = True
            if self._built:
                if self._interrupts > 1:
                    self._built.pools.kill()
                with suppress(HeadraceError):  # a disk that is full now must not hide what ended the run
                    self._recorder.record(await self._ended(self._built))
                await self._close(self._built)

    async def _train(self, built: BuiltRun) -> None:
        await self._redo(built)
        earlier, started = self._recorder.state.started, built.started(built.pipeline.step)
        self._recorder.record(started)
        if earlier and (said := machine_change(earlier, started)):
            self._recorder.record(Warned(built.clock(), said))
        await built.go_live()
        if not self._recorder.state.evals and built.pipeline.step == 0:
            self.before = await built.parts.evaluator.measure("before", 0)
        for one in self._recorder.state.evals:
            built.parts.minutes.measured(evaluation=one.seconds)
        await built.utilisation.start()
        self._training = True
        try:
            await built.pipeline.run()
        finally:
            self._training, self._trained, self.step = False, True, built.pipeline.step
            await built.utilisation.stop(LAST_WORD if self._interrupts < 2 else 0.0)
        if built.pipeline.interrupted:
            self.reason = self._left_for
        else:
            self.after = await built.parts.evaluator.measure("after", self.step)

    async def _close(self, built: BuiltRun) -> None:
        try:
            async with built.parts.telemetry.waits.named("closing", "the worker processes"):
                await built.close()
        except StalledError as error:  # nor may a process that cannot even be killed
            print(f"headrace: {error}", file=sys.stderr)

    async def _redo(self, built: BuiltRun) -> None:
        """Brings the trainer, too, to the moment at which the run was killed."""
        built.pipeline.discard(built.outdated)
        if not built.redo:
            return
        first, last = built.redo[0].step, built.redo[-1].step
        said = f"steps {first} to {last} are done again from the journal: they came after the checkpoint"
        self._recorder.record(Warned(built.clock(), said))
        await built.pipeline.redo(built.redo)

    def interrupt(self, why: str = "interrupted", again: str = " (Ctrl-C again: leave now)") -> None:
        """Once: a checkpoint at the next step's end, then leave. Twice: leave now."""
        self._interrupts += 1
        if self._interrupts == 1 and self._training and self._built:
            said = f"{why}: finishing this step, writing a checkpoint{again}"
            self._recorder.record(Warned(self._built.clock(), said))
            self._built.pipeline.interrupt()
        elif self._leaving and self._built:
            self._built.pools.kill()
        elif self._main:
            self._main.cancel()

    def stop(self, why: str, reason: str) -> None:
        """As the first interrupt, once; what has been trained already is measured and kept to the end."""
        if not self._interrupts and not self._trained:
            self._left_for = reason
            self.interrupt(why, again="")

    async def _ended(self, built: BuiltRun) -> RunEnded:
        saved = built.parts.snapshots.saved_step == built.pipeline.step
        return RunEnded(
            t=built.clock(),
            reason=self.reason,
            step=built.pipeline.step,
            accounting=built.parts.buffer.accounting(in_checkpoint=saved),
            engine_idle=built.utilisation.engine_idle,
            trainer_idle=built.utilisation.trainer_idle,
            prompt_tokens=built.utilisation.prompt_tokens,
            sampled_tokens=built.utilisation.sampled_tokens,
        )
