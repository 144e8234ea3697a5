"""Keeps a pipeline within `train.minutes`: connects the allowance (`loop/allowance.py`) to buffer, facts and settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.facts.facts import Fact, Planned, Warned
from headrace.facts.texts import duration, plural
from headrace.loop.allowance import Allowance
from headrace.loop.buffer import Buffer

Keep = Callable[[int, int], None]
"""Saves the new number of steps of the run, and the step at which that was decided."""


class Minutes:
    """The time limit of a run. Without an allowance it does nothing."""

    def __init__(
        self,
        allowance: Allowance | None = None,
        keep: Keep = lambda steps, step: None,
        record: Callable[[Fact], None] = lambda fact: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._allowance, self._keep, self._record, self._clock = allowance, keep, record, clock
        self._training = 0.0
        """Seconds of the trainer's longest step."""

    def begin(self, step: int) -> None:
        """Called when training begins, with the number of steps done."""
        if self._allowance is None:
            return
        self._allowance.begin(self._clock())
        if step and not self._allowance.another(self._clock()):
            said = "the time of train.minutes is over, so no more steps are done; to continue, raise it, or set it to 0"
            self._record(Warned(self._clock(), said))

    def measured(self, evaluation: float = 0.0, save: float = 0.0) -> None:
        """Takes measured seconds of an evaluation or a checkpoint."""
        if self._allowance:
            self._allowance.measured(evaluation, save)

    def another(self, step: int) -> bool:
        """Whether one more step fits. The first one always does, because a run must have a step."""
        return self._allowance is None or step == 0 or self._allowance.another(self._clock())

    @contextmanager
    def curfew(self, step: int, buffer: Buffer) -> Iterator[None]:
        """Closes the buffer, while the trainer waits for a batch, when it is too late to train one."""
        if self._allowance is None or step == 0:
            yield
            return
        patience = self._allowance.patience(self._clock(), self._training)
        timer = asyncio.get_running_loop().call_later(patience, buffer.close)
        try:
            yield
        finally:
            timer.cancel()

    def stepped(self, step: int, seconds: float) -> int | None:
        """Called after a step that took `seconds`. Returns the number of steps that fit, if it has changed; else None."""
        if self._allowance is None:
            return None
        self._training = max(self._training, seconds)
        before, steps = self._allowance.steps, self._allowance.stepped(step, self._clock())
        if steps is not None:
            self.changed(step, steps, f"a step takes {self._allowance.pace:.3g} s here, so {_instead(steps, before)}")
        return steps

    def over(self, step: int) -> None:
        """Called when the run ends before its last planned step."""
        assert self._allowance is not None
        left = self._allowance.end - self._clock()
        rest = f"need the remaining {duration(left)}" if left > 0 else "are still done, although the time is over"
        said = f"no more steps: the last evaluation and the checkpoint {rest} ({_instead(step, self._allowance.steps)})"
        self.changed(step, step, said)

    def changed(self, step: int, steps: int, said: str) -> None:
        """Saves and reports a new number of steps. It is on the disk before anything acts on it."""
        self._keep(steps, step)
        self._record(Planned(self._clock(), steps, said))


def _instead(steps: int, before: int) -> str:
    return f"{plural(steps, 'step')} instead of {before}"
