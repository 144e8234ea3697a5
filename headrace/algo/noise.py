"""Whether a bound of the algorithm lies inside rounding: then it stops what the very weights being trained have sampled.

Sampler and trainer compute the same policy in another order, mostly in bfloat16. A bound on their ratio that is narrower than what
this alone makes of it acts at random. Two measurements say so: the probe before the first step (`inside_rounding`, an estimate), and the
tokens of lag 0 in the first steps (`NoiseWatch`, the share itself). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from headrace.algo.config import AlgoConfig
from headrace.algo.recipes import Recipe
from headrace.reports import Noise, TrainReport

COSTLY = 0.02
"""Share of tokens: the recipes whose bounds lie outside rounding were measured at 0.002 and below."""
LEAST_TOKENS = 200
"""Of lag 0, before a share is said."""
WIDE = 5.0
"""A bound this many times as wide as the noise stops none of it."""


class Bound(NamedTuple):
    """In log space."""

    settings: str
    """For people, with their values."""
    low: float
    high: float
    one_sided: bool
    """It stops a token only on the side to which its advantage pushes."""
    of_sequence: bool
    """It looks at the mean over a sequence."""


def inside_rounding(algo: AlgoConfig, token_rms: float | None, tokens: int) -> list[str]:
    """Sentences on bounds that cost more than `COSTLY` of the tokens, if log-probs differ by `token_rms` a token, independently.

    None: nothing was measured. `tokens`: of the longest completion there can be; shorter ones have more noise in their mean.
    """
    if not token_rms:
        return []
    said = []
    for bound in bounds_of(algo.recipe):
        spread = token_rms / math.sqrt(tokens) if bound.of_sequence else token_rms
        share = _outside(bound, spread)
        if share > COSTLY:
            said.append(
                f"{bound.settings} will stop about {_percent(share)} of what these very weights sample: at the probe, trainer and "
                f"sampler differ by {token_rms:.2g} a token, which makes {spread:.2g} of what is bounded. {_remedy(spread)}"
            )
    return said


def bounds_of(recipe: Recipe) -> Iterator[Bound]:
    """Those that look at a log ratio. (The bounds of dppo, ipo, kpop and veto lie far outside rounding.)"""
    if recipe.old == "sampler" and (bounds := recipe.loss.log_bounds()):
        yield Bound(_names(recipe), *bounds, one_sided=True, of_sequence=recipe.loss.of_sequence)
    correction = recipe.correction
    if correction.mode == "mask" and correction.level != "sequence":
        inside = (_log(correction.low), math.log(correction.high))
        yield Bound(_names(recipe, "mask"), *inside, one_sided=False, of_sequence=correction.level == "geometric")
    if correction.opsm:
        yield Bound(_names(recipe, "opsm"), -correction.opsm, math.inf, one_sided=True, of_sequence=True)


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _outside(bound: Bound, spread: float) -> float:
    """Share of a normal distribution; of a one-sided bound half of it, because half of the tokens are pushed the other way."""
    if not spread:
        return 0.0
    tails = 0.5 * math.erfc(-bound.low / spread / math.sqrt(2)) + 0.5 * math.erfc(bound.high / spread / math.sqrt(2))
    return tails / 2 if bound.one_sided else tails


class NoiseWatch:
    """Told of every step; says once of each bound what it costs at lag 0, where trainer and sampler are the same weights."""

    def __init__(self, algo: AlgoConfig | None = None) -> None:
        self._recipe = (algo or AlgoConfig()).recipe
        self._stopped: dict[str, float] = {}
        self._tokens = 0
        self._said: set[str] = set()

    def told(self, report: TrainReport) -> list[str]:
        """Sentences."""
        fresh = next((one for one in report.lags if one.name == "0"), None)
        if fresh is None or report.noise is None:
            return []
        self._tokens += fresh.tokens
        stopped = {rule: fresh.masked.get(rule, 0.0) for rule in ("mask", "veto", "kpop", "opsm")}
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
        whole = rule == "opsm" or (rule == "clip" and self._recipe.loss.of_sequence)
        whole = whole or (rule == "mask" and self._recipe.correction.level == "geometric")
        spread = noise.sequence_rms if whole else noise.token_rms
        return (
            f"{_names(self._recipe, rule)} lies inside rounding: it stopped {_percent(self._stopped[rule] / self._tokens)} of "
            f"{self._tokens:,} tokens that the very weights being trained had sampled (lag 0). There trainer and sampler differ by "
            f"{noise.token_rms:.2g} a token and by {noise.sequence_rms:.2g} in the mean of a sequence (root mean square). {_remedy(spread)}"
        )


def _names(recipe: Recipe, rule: str = "clip") -> str:
    correction = recipe.correction
    match rule:
        case "clip":
            given = {f"algo.{name}": recipe.loss.constants()[name] for name in recipe.loss.cuts}
        case "mask":
            given = {"algo.correction.low": correction.low, "algo.correction.high": correction.high}
        case _:
            given = {f"algo.correction.{rule}": getattr(correction, rule)}
    return " and ".join(f"{name} = {value:g}" for name, value in given.items())


def _remedy(spread: float) -> str:
    return f"Let the bound be wider than {WIDE * spread:.2g} in log space (docs/algorithms.md, Bounds and rounding), or compute both in float32"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
