"""The limits from which a number of a run calls for attention: one table for the advice, for the rows of the overview, and for
`docs/healthy.md`, which a test compares with it.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Mark = Literal["good", "warn", "bad", "unknown"]
"""Good: nothing to do. Warn: look, there is a remedy. Bad: the run is of no use as it is. Unknown: nothing was measured yet."""
SEVERITY: tuple[Mark, ...] = ("unknown", "good", "warn", "bad")
"""Marks, the worst last."""


class Limit(NamedTuple):
    """The values from which a number is marked."""

    warn: float
    bad: float = math.inf

    def mark(self, value: float | None) -> Mark:
        """Returns the mark of a value. None was not measured; a number that is not finite is the worst there is."""
        if value is None:
            return "unknown"
        if not math.isfinite(value) or value >= self.bad:
            return "bad"
        return "warn" if value >= self.warn else "good"


LIMITS = {
    "share/failed": Limit(0.05, 0.5),
    "share/truncated": Limit(0.3, 0.9),
    "share/no_contrast": Limit(0.5, 0.95),
    "share/dropped": Limit(0.25, 0.9),
    "prompts/new": Limit(0.95),
    "time/engine_idle": Limit(0.5),
    "train/kl": Limit(0.1, 1.0),
    "train/grad_norm": Limit(10.0, 100.0),
    "train/entropy": Limit(20.0),
    "train/skipped": Limit(0.05, 0.5),
    "train/explained_variance": Limit(0.95),
}
"""Names as on the boards. Shares are of 1 and KL is in nats. `train/grad_norm`: the mean of the last steps divided by the median of those
before. `train/entropy`: its value at the start divided by the present one, or the reverse if it has risen. `train/skipped`: the share of
the last steps that did not change the weights. `train/explained_variance`: 1 less it, the share of the variance
of returns that a critic leaves unexplained. `prompts/new`: the share of a curriculum's draws that were of prompts it had never drawn."""

OFTEN = 0.5
"""Share of its time from which a trainer that waits is named in advice."""
LEAST = 32
"""Fewest rollouts from which shares are judged; an eighth as many groups."""
EARLY = 10
"""Fewest steps from which the drawn reward is judged."""
LAST = 20
"""Steps over which the numbers of a step are averaged."""
WARM = 40
"""Fewest steps of a critic from which its values are judged."""
ERRORS = 2.0
"""Standard errors from which a reward has changed."""


def worst(marks: list[Mark]) -> Mark:
    """Returns the worst mark; unknown if there is none."""
    return max(marks, key=SEVERITY.index, default="unknown")
