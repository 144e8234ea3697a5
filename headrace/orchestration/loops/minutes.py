"""Keeps a pipeline within `train.minutes`: the allowance (`auto/allowance.py`) joined to its buffer, its screen and its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.auto.allowance import Allowance
from headrace.observe.facts import Fact, Planned, Warned
from headrace.observe.text import duration, plural
from headrace.rollouts.buffer import Buffer

Keep = Callable[[int, int], None]
"""Writes down that the run is to have so many steps, and at which step that was decided."""


class Minutes:
    """Without an allowance it never says anything."""

    def __init__(
        self,
        allowance: Allowance | None = None,
        keep: Keep = lambda steps, step: None,
        record: Callable[[Fact], None] = lambda fact: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._allowance, self._keep, self._record, self._clock = allowance, keep, record, clock
        self._training = 0.0
        """Seconds of the longest of the trainer's steps."""

    def begin(self, step: int) -> None:
        """Training begins, with so many steps done."""
        if self._allowance is None:
            return
        self._allowance.begin(self._clock())
        if step and not self._allowance.another(self._clock()):
            said = "the time of train.minutes is over: no more steps are done; to go on, set it to more, or to 0"
            self._record(Warned(self._clock(), said))

    def measured(self, evaluation: float = 0.0, save: float = 0.0) -> None:
        """Seconds that such things took here."""
        if self._allowance:
            self._allowance.measured(evaluation, save)

    def another(self, step: int) -> bool:
        """Whether one more step fits. The first one always does: a run without a step is none."""
        return self._allowance is None or step == 0 or self._allowance.another(self._clock())

    @contextmanager
    def curfew(self, step: int, buffer: Buffer) -> Iterator[None]:
        """While a batch is waited for: the buffer is closed when it is too late to train one."""
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
        """After a step, on which the trainer worked for `seconds`: the number of steps that fit, where it is another one now."""
        if self._allowance is None:
            return None
        self._training = max(self._training, seconds)
        before, steps = self._allowance.steps, self._allowance.stepped(step, self._clock())
        if steps is not None:
            self.changed(step, steps, f"a step takes {self._allowance.pace:.3g} s here, so {_instead(steps, before)}")
        return steps

    def over(self, step: int) -> None:
        """The run ends before its last step."""
        assert self._allowance is not None
        left = self._allowance.end - self._clock()
        rest = f"need the {duration(left)} that are left" if left > 0 else "are all that is done when the time is over"
        said = f"no more steps: the last evaluation and the checkpoint {rest} ({_instead(step, self._allowance.steps)})"
        self.changed(step, step, said)

    def changed(self, step: int, steps: int, said: str) -> None:
        """It is on the disk before anybody acts on it."""
        self._keep(steps, step)
        self._record(Planned(self._clock(), steps, said))


def _instead(steps: int, before: int) -> str:
    return f"{plural(steps, 'step')} instead of {before}"
