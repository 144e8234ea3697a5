"""Calls the user's functions after steps and evaluations, in the user's thread, while the event loop continues."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from headrace.core.errors import ConfigError, StopTraining
from headrace.facts.facts import Evaluated
from headrace.facts.progress import Evaluation, Step
from headrace.facts.records import MetricsFact, StepRow
from headrace.facts.run_state import RunState
from headrace.run.hosting import Errands
from headrace.settings.user_code import one_line

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
            said = f"{name} raised {one_line(error)}"
            self._stop(said, said)

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
