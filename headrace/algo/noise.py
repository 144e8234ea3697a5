"""Checks whether a bound of the algorithm is narrower than rounding: it then stops tokens that the very weights being
trained have sampled.

Sampler and trainer compute the same policy with sums in another order, mostly in bfloat16. A bound on their ratio that
is narrower than the resulting noise acts at random. There are two measurements: an estimate from the probe before the
first step (`inside_rounding`), and the share itself, over tokens of lag 0 in the first steps (`NoiseWatch`). Imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from headrace.algo.config import AlgoConfig
from headrace.algo.recipes import Recipe
from headrace.algo.rules import RULES
from headrace.core.reports import Noise, TrainReport

COSTLY = 0.02
"""A bound that stops a larger share of the tokens is reported. Recipes with bounds outside rounding were measured at
0.002 and below."""
LEAST_TOKENS = 200
"""Number of tokens of lag 0 that are needed before a share is reported."""
WIDE = 5.0
"""A bound this many times as wide as the noise stops none of it."""


class Bound(NamedTuple):
    """A bound on a log ratio."""

    settings: str
    """Names and values of its settings, for people."""
    low: float
    high: float
    one_sided: bool
    """Whether it stops a token only on the side to which its advantage pushes."""
    of_sequence: bool
    """Whether it bounds the mean over a sequence."""


def inside_rounding(algo: AlgoConfig, token_rms: float | None, tokens: int) -> list[str]:
    """Returns a sentence for each bound that stops more than `COSTLY` of the tokens, if log-probs differ by `token_rms`
    per token, independently.

    `token_rms` is None if nothing was measured. `tokens`: length of the longest completion possible; shorter ones have
    more noise in their mean.
    """
    if not token_rms:
        return []
    messages = []
    for bound in bounds_of(algo.recipe):
        spread = token_rms / math.sqrt(tokens) if bound.of_sequence else token_rms
        share = _outside(bound, spread)
        if share > COSTLY:
            messages.append(
                f"{bound.settings} will stop about {_percent(share)} of the tokens that these very weights sample: on the probe, trainer "
                f"and sampler differ by {token_rms:.2g} per token, and by {spread:.2g} in the bounded quantity. {_remedy(spread)}"
            )
    return messages


def bounds_of(recipe: Recipe) -> Iterator[Bound]:
    """Yields the bounds on a log ratio. (The bounds of dppo, ipo, kpop and veto lie far outside rounding.)"""
    if recipe.old == "sampler" and (bounds := recipe.loss.log_bounds()):
        yield Bound(_names(recipe), *bounds, one_sided=True, of_sequence=recipe.loss.of_sequence)
    correction = recipe.correction
    if correction.mode == "mask" and correction.level != "sequence":
        inside = (_log(correction.low), math.log(correction.high))
        yield Bound(_names(recipe, "mask"), *inside, one_sided=False, of_sequence=correction.level == "geometric")
    for rule in correction.rules:
        if bounds := rule.log_bounds():
            yield Bound(_names(recipe, rule.name), *bounds, one_sided=True, of_sequence=rule.of_sequence)


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _outside(bound: Bound, spread: float) -> float:
    """Returns the share of a normal distribution outside a bound; half of it for a one-sided bound, because half of the
    tokens are pushed the other way."""
    if not spread:
        return 0.0
    tails = 0.5 * math.erfc(-bound.low / spread / math.sqrt(2)) + 0.5 * math.erfc(bound.high / spread / math.sqrt(2))
    return tails / 2 if bound.one_sided else tails


class NoiseWatch:
    """Watches every step, and reports once for each bound how much it stops at lag 0, where trainer and sampler have
    the same weights."""

    def __init__(self, algo: AlgoConfig | None = None) -> None:
        self._recipe = (algo or AlgoConfig()).recipe
        self._stopped: dict[str, float] = {}
        self._tokens = 0
        self._said: set[str] = set()

    def check(self, report: TrainReport) -> list[str]:
        """Returns a sentence for each bound that is newly found to stop too much."""
        fresh = next((stats for stats in report.lags if stats.name == "0"), None)
        if fresh is None or report.noise is None:
            return []
        self._tokens += fresh.tokens
        stopped = {rule: fresh.masked.get(rule, 0.0) for rule in ("mask", *RULES)}
        stopped["clip"] = fresh.clipped if self._recipe.loss.cuts else 0.0
        for rule, share in stopped.items():
            self._stopped[rule] = self._stopped.get(rule, 0.0) + share * fresh.tokens
        if self._tokens < LEAST_TOKENS:
            return []
        costly = [rule for rule, count in self._stopped.items() if count > COSTLY * self._tokens]
        new = [rule for rule in costly if rule not in self._said]
        self._said.update(new)
        return [self._sentence(rule, report.noise) for rule in new]

    def _sentence(self, rule: str, noise: Noise) -> str:
        whole = rule == "clip" and self._recipe.loss.of_sequence
        whole = whole or (rule in RULES and RULES[rule].of_sequence)
        whole = whole or (rule == "mask" and self._recipe.correction.level == "geometric")
        spread = noise.sequence_rms if whole else noise.token_rms
        return (
            f"{_names(self._recipe, rule)} lies inside rounding: it stopped {_percent(self._stopped[rule] / self._tokens)} of "
            f"{self._tokens:,} tokens that the very weights being trained had sampled (lag 0). There trainer and sampler differ by "
            f"{noise.token_rms:.2g} per token and by {noise.sequence_rms:.2g} in the mean of a sequence (root mean square). {_remedy(spread)}"
        )


def _names(recipe: Recipe, rule: str = "clip") -> str:
    correction = recipe.correction
    match rule:
        case "clip":
            given = {f"algo.{name}": recipe.loss.constants()[name] for name in recipe.loss.cuts}
        case "mask":
            given = {"algo.correction.low": correction.low, "algo.correction.high": correction.high}
        case _:
            given = {
                f"algo.correction.{rule}": given_rule.threshold
                for given_rule in correction.rules
                if given_rule.name == rule
            }
    return " and ".join(f"{name} = {value:g}" for name, value in given.items())


def _remedy(spread: float) -> str:
    return f"Set a bound wider than {WIDE * spread:.2g} in log space (docs/algorithms.md, Bounds and rounding), or compute both in float32"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
