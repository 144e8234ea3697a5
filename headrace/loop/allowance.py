"""The remaining time of a run with `train.minutes`: how many steps still fit, and when the last one has to be over.

The fit before the start uses the speeds of a short measurement. The first real steps show how long a step takes on this machine with
everything else that runs on it, and how many groups have to be sampled to get enough with contrast. Both change while the model learns:
completions become shorter, and fewer groups have contrast. So the number of steps is fitted again after `REFIT_AFTER` steps, and
each time that their number has doubled. A run that becomes slower in between ends early, so that its last evaluation and its
checkpoint are within the time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

REFIT_AFTER = 3
"""Steps of this process after which their number is fitted again for the first time."""
OFF = 0.15
"""Relative difference below which the number of steps is not changed."""
MARGIN = 1.25
"""Safety factor: one more step may take this many times the longest of the recent ones; so may the last evaluation and checkpoint."""
FIRST = 3.0
"""The same factor for the first step, whose time is known from the short measurement alone."""
RECENT = 5
"""Steps over which the pace is averaged."""


@dataclass(kw_only=True)
class Allowance:
    """The time that one process of a run has. A resumed run has what the processes before it left. All times are in seconds of the
    run's clock."""

    end: float
    """The time at which the run must have ended."""
    steps: int
    """Steps that are planned."""
    most: int
    """Steps that the recipe asks for."""
    evaluation: float
    """Seconds that the last evaluation is expected to take."""
    save: float
    """Seconds that the last checkpoint is expected to take."""
    step: float
    """Seconds that a step is expected to take, until the first one is over."""
    _refit_after: int = REFIT_AFTER
    """Steps of this process after which their number is fitted next."""
    _began: float | None = None
    _ends: list[float] = field(default_factory=list)
    """The times at which the steps of this process ended."""

    def begin(self, now: float) -> None:
        """Marks the start of training."""
        self._began = now

    def measured(self, evaluation: float = 0.0, save: float = 0.0) -> None:
        """Replaces the expected seconds of an evaluation or a checkpoint by measured ones; 0 leaves them."""
        self.evaluation = max(evaluation, 0.0) or self.evaluation
        self.save = max(self.save, save)

    @property
    def reserved(self) -> float:
        """Seconds reserved for the evaluation and the checkpoint after the last step."""
        return MARGIN * self.evaluation + MARGIN * self.save

    @property
    def pace(self) -> float:
        """Seconds of one step: the mean of the last `RECENT`, without the first, which waits for the pipeline to fill."""
        times = self._times()
        times = times[1:] if 1 < len(times) == len(self._ends) else times
        return sum(times) / len(times) if times else self.step

    def left(self, now: float) -> float:
        """Seconds that are left for steps."""
        return self.end - self.reserved - now

    def patience(self, now: float, doing: float) -> float:
        """Returns the seconds that may pass before a step of `doing` seconds has to begin."""
        return max(0.0, self.left(now) - MARGIN * doing)

    def another(self, now: float) -> bool:
        """Returns whether one more step fits."""
        times = self._times()
        return self.left(now) >= (MARGIN * max(times) if times else FIRST * self.step)

    def stepped(self, done: int, now: float) -> int | None:
        """Records the end of a step. `done`: steps of the whole run.

        Returns a new number of steps if the remaining time calls for one, else None."""
        self._ends.append(now)
        if len(self._ends) < self._refit_after:
            return None
        self._refit_after *= 2
        room = max(0, math.floor(self.left(now) / self.pace)) if self.pace > 0 else self.most
        steps = max(done, min(self.most, done + room))
        if abs(steps - self.steps) <= OFF * self.steps:
            return None
        self.steps = steps
        return steps

    def _times(self) -> list[float]:
        """Returns the seconds of the last steps, each from the end of the one before."""
        if self._began is None:
            return []
        ends = [self._began, *self._ends][-RECENT - 1 :]
        return [after - before for before, after in itertools.pairwise(ends)]
