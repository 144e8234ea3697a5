"""The knowledge of a prompt, and the chance that its next group has contrast.

The rollouts of a prompt are trials: a rollout agrees if it got the commonest reward of its group. For rewards of two values this is the
solve rate p or 1 - p, whichever is larger, and it has a meaning for rewards of any values. The rate of agreement has a Beta posterior
whose counts are discounted, because the policy changes: the discounted Beta posterior of the solve rate of MoPPS (Qu et al. 2025,
arXiv:2507.04632). A group of G rollouts has contrast with the probability 1 - p^G - (1 - p)^G, the chance that dynamic sampling keeps it
(DAPO, Yu et al. 2025, arXiv:2503.14476).

Where rewards do not show contrast (a length penalty gives equal rewards contrast), a group is one trial: whether it had contrast.
"""

from __future__ import annotations

import math
import random
from typing import Literal

from headrace.types import Struct

PromptPool = Literal["new", "mixed", "solved", "hopeless", "failed"]
"""The result of the last group of a prompt: nothing yet, contrast, all rewards equal and high, all equal and low, a failure."""

SAMPLES = 3
"""One draw is Thompson sampling: an uncertain prompt is tried from time to time. Very many give the expected chance, which tries nothing.
Little depends on it: 50, 48 and 49 % of groups without contrast with 1, 3 and 30 draws (`benchmarks/curriculum.py`, 16 candidates)."""
LONGEST_REST = 5
"""Doublings of a rest at most."""


class Belief(Struct, frozen=True, array_like=True):
    """The knowledge of one prompt."""

    pool: PromptPool = "new"
    at: int = 0
    """The draw at which the counts were discounted last."""
    agreed: float = 0.0
    """Discounted number of rollouts with the commonest reward of their group."""
    differed: float = 0.0
    """Discounted number of the other rollouts."""
    mixed: float = 0.0
    """Discounted number of groups with contrast."""
    flat: float = 0.0
    streak: int = 0
    """Groups in a row without contrast."""
    due: int = 0
    """The draw until which the prompt rests."""
    mean: float = math.nan
    """Mean reward of its last group; NaN if it has none."""
    drawn: int = 0
    """How often it was drawn."""

    def kept(self, now: int, half_life: int) -> float:
        """The weight of its counts at draw `now`."""
        return float(0.5 ** ((now - self.at) / half_life))


def contrast(rate: float, size: int) -> float:
    """The probability that a group of `size` rollouts has two outcomes, one of which has the probability `rate` in each rollout."""
    return float(1.0 - rate**size - (1.0 - rate) ** size)


def sampled_contrast(belief: Belief, kept: float, size: int, *, by_group: bool, chance: random.Random) -> float:
    """The mean of `SAMPLES` draws from the posterior of the chance of contrast, with the prior Beta(1, 1). `kept`: the weight of the
    belief's counts; `by_group`: count groups instead of rollouts."""
    if by_group or belief.pool == "failed":
        mixed, flat = 1.0 + kept * belief.mixed, 1.0 + kept * belief.flat
        return sum(chance.betavariate(mixed, flat) for _ in range(SAMPLES)) / SAMPLES
    agreed, differed = 1.0 + kept * belief.agreed, 1.0 + kept * belief.differed
    return sum(contrast(chance.betavariate(agreed, differed), size) for _ in range(SAMPLES)) / SAMPLES


def resting(streak: int, base: int) -> int:
    """Draws of rest after `streak` groups in a row without contrast."""
    return base << min(streak - 1, LONGEST_REST)
