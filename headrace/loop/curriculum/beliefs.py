"""The knowledge of a prompt, and the chance that its next group has contrast.

The logit of the rate at which a prompt is solved is the level of the policy plus the ease of the prompt, as in Rasch's model of tests (1960).
Each group is an observation of that sum. It moves the ease of its prompt, and by a small share the level: so what one prompt shows is
known of all others, and a prompt that was hopeless is tried again when the policy has become better. The uncertainty of a prompt's
ease grows while it is not drawn, as that of a player's rating does between games (Glicko, Glickman 1999).

A group of G rollouts that are solved with the probability p has contrast with the probability 1 - p^G - (1 - p)^G, the chance that dynamic
sampling keeps it (DAPO, Yu et al. 2025, arXiv:2503.14476). A prompt is judged by one draw of p (Thompson sampling): prompts that are thought to be solved are
tried from time to time, and the more often the less is known of them. With the expected chance instead, a run of the demo drew 27 of its
136 prompts in its last steps (docs/curriculum.md).

A group may be larger where contrast is rare. Its size follows from the expected chance: before the first rollout is sampled, and from earlier
groups alone. So the rollouts of a group are independent draws of one policy, and their advantages have no bias by its size, as they would if
sampling went on until they differed.

Rewards of more than two values may differ among rollouts that all are solved, or all are not. How often that happens is counted for each
prompt. Where rewards do not show contrast (a length penalty gives equal rewards contrast), whole groups are counted.
"""

from __future__ import annotations

import math
import random
from typing import Literal

import numpy as np

from headrace.core.types import Struct

PromptPool = Literal["new", "mixed", "solved", "hopeless", "failed"]
"""The result of the last group of a prompt: nothing yet, contrast, all rewards equal and high, all equal and low, a failure."""

DOUBT = 4.0
"""Variance of the ease of a prompt that nothing is known of, in squared logits. It is never larger."""
GROWTH = 8.0
"""Growth of that variance in one half-life of draws."""
SHARE = 0.06
"""Share of a surprise by which the level moves; the mean of all surprises at first. These three numbers fit a recorded run of the demo best
among a few (docs/curriculum.md)."""
LONGEST_REST = 5
"""Doublings of a rest at most."""
_NODES, _TALL = np.polynomial.hermite.hermgauss(15)
_WEIGHTS = _TALL / _TALL.sum()


class Belief(Struct, frozen=True, array_like=True):
    """The knowledge of one prompt."""

    pool: PromptPool = "new"
    at: int = 0
    """The draw at which the prompt was observed last."""
    ease: float = 0.0
    """Logit of its solve rate above the level of the policy."""
    doubt: float = DOUBT
    """Variance of the ease at that draw."""
    mixed: float = 0.0
    """Discounted number of groups with contrast."""
    flat: float = 0.0
    """Discounted number of groups without."""
    fine: float = 0.0
    """Discounted number of groups with contrast whose rollouts were all solved, or all not."""
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

    def doubt_at(self, now: int, half_life: int) -> float:
        """The variance of its ease at draw `now`."""
        return min(DOUBT, self.doubt + GROWTH * (now - self.at) / half_life)


class Level(Struct, frozen=True):
    """The policy as the prompts show it."""

    logit: float = 0.0
    seen: int = 0
    """Groups that were observed."""

    def after(self, surprise: float) -> Level:
        """`surprise`: of the last group, in logits."""
        return Level(self.logit + max(SHARE, 1 / (self.seen + 2)) * surprise, self.seen + 1)


def contrast(rate: float, size: int) -> float:
    """The probability that a group of `size` rollouts has two outcomes, one of which has the probability `rate` in each rollout."""
    return float(1.0 - rate**size - (1.0 - rate) ** size)


def rate_of(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))


def observed(logit: float, doubt: float, solved: int, size: int) -> tuple[float, float]:
    """Returns mean and variance of a logit after `solved` of `size` rollouts were, by Laplace's approximation around the most probable
    value."""
    found = logit
    for _ in range(8):  # Newton's steps, which are at most 2 logits long
        rate = rate_of(found)
        slope = solved - size * rate - (found - logit) / doubt
        found += max(-2.0, min(2.0, slope / (size * rate * (1.0 - rate) + 1.0 / doubt)))
    rate = rate_of(found)
    return found, 1.0 / (size * rate * (1.0 - rate) + 1.0 / doubt)


def sampled_chance(
    belief: Belief, level: Level, *, now: int, half_life: int, size: int, by_group: bool, chance: random.Random
) -> float:
    """A draw from what is known of the chance that the next group of a prompt has contrast. `now`: the draw of the run; `by_group`: by the
    share of its earlier groups that had."""
    kept = belief.kept(now, half_life)
    if by_group or belief.pool == "failed":
        return chance.betavariate(1.0 + kept * belief.mixed, 1.0 + kept * belief.flat)
    logit = chance.gauss(level.logit + belief.ease, math.sqrt(belief.doubt_at(now, half_life)))
    return _with_fine(contrast(rate_of(logit), size), belief, kept)


def expected_chance(belief: Belief, level: Level, *, now: int, half_life: int, size: int) -> float:
    """The expectation of the chance that the next group of a prompt has contrast, by Gauss and Hermite's quadrature."""
    spread = math.sqrt(2.0 * belief.doubt_at(now, half_life))
    logits = level.logit + belief.ease + spread * _NODES
    mean = sum(w * contrast(rate_of(logit), size) for logit, w in zip(logits, _WEIGHTS, strict=True))
    return _with_fine(float(mean), belief, belief.kept(now, half_life))


def _with_fine(two: float, belief: Belief, kept: float) -> float:
    """`two`: the chance of two outcomes. Adds that of rewards which differ though all are solved, or none is."""
    fine = kept * belief.fine / (1.0 + kept * (belief.fine + belief.flat))
    return two + (1.0 - two) * fine


def resting(streak: int, base: int) -> int:
    """Draws of rest after `streak` groups in a row without contrast."""
    return base << min(streak - 1, LONGEST_REST)
