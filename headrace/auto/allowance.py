"""The time of a run that has `train.minutes`, while it goes on: how many steps still fit, and when the last one has to be over.

The fit before the start knows speeds of a short measurement. The first real steps show what a step takes here, with all that runs
beside it, and how many groups it takes to have enough that teach something: once, after `LOOK` of them, the number of steps is fitted
again. After that a run that is slower than it was ends early, so that its last evaluation and its checkpoint are within the time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

LOOK = 3
"""Steps after which their number is fitted again."""
OFF = 0.15
"""Share by which the number has to differ to be worth it."""
MARGIN = 1.25
"""Times the longest of the last steps that one more may take, and times the first evaluation that the last one may."""
FIRST = 3.0
"""Times what is expected of the first step, of which only the short measurement has told."""
RECENT = 5


@dataclass
class Allowance:
    """Of one process of a run; one that goes on has what the processes before have left. All times are of the run's clock."""

    end: float
    """When the run has to be over."""
    steps: int
    """That are planned."""
    most: int
    """That the recipe asks for."""
    evaluation: float
    """Seconds that the last evaluation is expected to take."""
    save: float
    """Seconds that the last checkpoint is expected to take."""
    step: float
    """Seconds that a step is expected to take, until the first one is over."""
    fitted: bool = False
    """Whether the number of steps has been fitted to real ones."""
    _began: float | None = None
    _ends: list[float] = field(default_factory=list)
    """Of the steps of this process."""

    def begin(self, now: float) -> None:
        """Training begins."""
        self._began = now

    def measured(self, evaluation: float = 0.0, save: float = 0.0) -> None:
        """What such things have taken here."""
        self.evaluation = max(evaluation, 0.0) or self.evaluation
        self.save = max(self.save, save)

    @property
    def reserved(self) -> float:
        """Seconds for what comes after the last step."""
        return MARGIN * self.evaluation + MARGIN * self.save

    @property
    def pace(self) -> float:
        """Seconds of one step: the mean of the last ones."""
        times = self._times()
        return sum(times) / len(times) if times else self.step

    def left(self, now: float) -> float:
        """Seconds for steps."""
        return self.end - self.reserved - now

    def patience(self, now: float, doing: float) -> float:
        """Seconds that may pass before a step has to begin which takes `doing` seconds itself."""
        return max(0.0, self.left(now) - MARGIN * doing)

    def another(self, now: float) -> bool:
        """Whether one more step fits."""
        times = self._times()
        return self.left(now) >= (MARGIN * max(times) if times else FIRST * self.step)

    def stepped(self, done: int, now: float) -> int | None:
        """After a step; `done`: of the whole run. Another number of steps where the time asks for it, else None."""
        self._ends.append(now)
        if self.fitted or len(self._ends) < LOOK:
            return None
        self.fitted = True
        room = max(0, math.floor(self.left(now) / self.pace)) if self.pace > 0 else self.most
        steps = max(done, min(self.most, done + room))
        if abs(steps - self.steps) <= OFF * self.steps:
            return None
        self.steps = steps
        return steps

    def _times(self) -> list[float]:
        """Of the last steps, each from the end of the one before."""
        if self._began is None:
            return []
        ends = [self._began, *self._ends][-RECENT - 1 :]
        return [after - before for before, after in itertools.pairwise(ends)]
