"""Distributions of lengths and latencies, each with its quantile function, so that one uniform number gives one draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from headrace.core.errors import ConfigError
from headrace.core.types import Struct

_NORMAL = NormalDist()
_EDGE = 1e-9
_KEYS = {"fixed": ("mean",), "lognormal": ("mean", "sigma"), "pareto": ("mean", "alpha")}
_REMEDY = (
    "write it as a number, lognormal:mean=4000,sigma=0.8 or pareto:mean=4000,alpha=1.5 (and ,correlation=0.5 for prompts whose "
    "rollouts are alike)"
)


class Distribution(Struct, frozen=True):
    """A distribution of positive numbers: tokens or seconds."""

    kind: Literal["fixed", "lognormal", "pareto", "empirical"]
    mean: float = 0.0
    """Mean of `fixed`, `lognormal` and `pareto`."""
    sigma: float = 0.0
    """`lognormal`: standard deviation of the logarithm. 0.5 is mild, 1 has a tail."""
    alpha: float = 0.0
    """`pareto`: exponent above 1; the nearer to 1, the heavier the tail."""
    values: tuple[float, ...] = ()
    """`empirical`: the values, ascending and equally probable."""
    correlation: float = 0.0
    """Correlation of two draws for the same prompt, through a Gaussian copula: 0 makes them independent, 1 equal. Their common factor is
    the prompt's difficulty."""

    def quantile(self, u: float) -> float:
        """Returns the value below which a share `u` in (0, 1) of the draws is."""
        match self.kind:
            case "fixed":
                return self.mean
            case "lognormal":
                return self.mean * math.exp(self.sigma * normal_quantile(u) - self.sigma**2 / 2)
            case "pareto":
                return self.mean * (self.alpha - 1) / self.alpha * (1 - u) ** (-1 / self.alpha)
            case _:
                return self.values[int(u * len(self.values))]

    def draw(self, u: float, difficulty: float = 0.0) -> float:
        """Returns one draw. `u`: uniform, of this draw; `difficulty`: standard normal, of the prompt."""
        if self.correlation:
            own, shared = math.sqrt(1 - self.correlation), math.sqrt(self.correlation)
            u = _NORMAL.cdf(shared * difficulty + own * normal_quantile(u))
        return self.quantile(min(max(u, _EDGE), 1 - _EDGE))

    def mean_below(self, limit: float, grid: int = 400) -> float:
        """Returns the mean of min(draw, limit), computed numerically."""
        return sum(min(limit, self.quantile((i + 0.5) / grid)) for i in range(grid)) / grid

    @property
    def words(self) -> str:
        """The distribution in a few words."""
        alike = f", correlation {self.correlation:g} within a prompt" if self.correlation else ""
        match self.kind:
            case "fixed":
                return f"{self.mean:g} each"
            case "lognormal":
                return f"log-normal, mean {self.mean:g}, sigma {self.sigma:g}{alike}"
            case "pareto":
                return f"Pareto, mean {self.mean:g}, alpha {self.alpha:g}{alike}"
            case _:
                mean = sum(self.values) / len(self.values)
                return f"as measured ({len(self.values)} draws, mean {mean:.4g}, longest {self.values[-1]:.4g}){alike}"


def fixed(value: float) -> Distribution:
    return Distribution("fixed", mean=float(value))


def empirical(values: Sequence[float], correlation: float = 0.0) -> Distribution:
    assert values, "an empirical distribution needs values"
    return Distribution("empirical", values=tuple(sorted(map(float, values))), correlation=correlation)


def parse(text: str) -> Distribution:
    """Parses `800`, `lognormal:mean=4000,sigma=0.8` or `pareto:mean=4000,alpha=1.5`. Raises ConfigError with the remedy."""
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            return _checked(fixed(float(kind)), text)
        settings = {key.strip(): float(value) for key, _, value in (part.partition("=") for part in rest.split(","))}
    except ValueError:
        raise ConfigError(f"{text} is not a distribution: {_REMEDY}") from None
    if kind not in _KEYS or set(settings) - {"correlation"} != set(_KEYS[kind]):
        raise ConfigError(f"{text} is not a distribution: {_REMEDY}")
    return _checked(Distribution(kind, **settings), text)  # type: ignore[arg-type]


def _checked(made: Distribution, text: str) -> Distribution:
    tail = made.kind != "pareto" or made.alpha > 1
    if not (made.mean >= 0 and made.sigma >= 0 and tail and 0 <= made.correlation <= 1):
        raise ConfigError(f"{text}: mean and sigma are at least 0, alpha is above 1, correlation is from 0 to 1")
    return made


def normal_quantile(u: float) -> float:
    return _NORMAL.inv_cdf(min(max(u, _EDGE), 1 - _EDGE))


@lru_cache(maxsize=64)
def solve_shift(mean: float) -> float:
    """Returns `a` such that Φ(a - z), averaged over z ~ N(0, 1), is `mean`: Φ(a / √2) = mean."""
    return math.sqrt(2) * normal_quantile(mean)
