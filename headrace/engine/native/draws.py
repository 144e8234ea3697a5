"""A draw of tokens, as it is asked for and as it is answered, whoever draws: the kernels (`kernels/drawing.py`) or PyTorch (`sampler.py`).

Legend: R rows, V vocabulary, M tokens kept in all rows together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LOWEST = float(np.finfo(np.float32).min)
"""A cut here lets everything through but tokens of logit -inf, which the model itself forbids."""
BELOW_ONE = 1.0 - 2.0**-52
"""Random numbers are at most this: a target strictly below a sum is met by a token that adds something."""


@dataclass(frozen=True)
class Filters:
    """The filters that cut tokens before a draw, one value per row. A row of top_k 0, top_p 1 and min_p 0 keeps everything.

    Top-k acts first, then top-p, then min-p. Tokens that are as probable as the last one kept are kept. Sums are of float64: kernels and
    PyTorch keep the same tokens.
    """

    temperature: np.ndarray
    """[R] float64 > 0: top-p and min-p are about probabilities at this temperature."""
    top_k: np.ndarray
    """[R] int64"""
    top_p: np.ndarray
    """[R] float64"""
    min_p: np.ndarray
    """[R] float64"""

    def on(self) -> np.ndarray:
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def share_of_all(self) -> np.ndarray:
        """[R] whether top-p is a share of the sum over the whole vocabulary: top-k acts before it."""
        return (self.top_k == 0) & (self.top_p < 1)

    def at(self, rows: np.ndarray | slice) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a token is drawn, one value per row: float64 but for `top_k` (int64, 0 = off), `seed` (uint64) and `counter` (int64).

    Temperature 0 is greedy: the largest logit is taken, whatever the filters say.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    counter: np.ndarray

    def filters(self) -> Filters:
        """The filters in force: none on greedy rows, which report the plain distribution."""
        greedy = self.temperature == 0
        return Filters(
            np.where(greedy, 1.0, self.temperature),
            np.where(greedy, 0, self.top_k),
            np.where(greedy, 1.0, self.top_p),
            np.where(greedy, 0.0, self.min_p),
        )


@dataclass(frozen=True, kw_only=True)
class DrawDetails:
    """Further results wanted of a draw, besides tokens and log-probs, one value per row."""

    masks: np.ndarray
    """[R] bool: the tokens that filters kept."""
    tops: np.ndarray
    """[R] int: that many of the most probable tokens."""
    left: np.ndarray | None = None
    """[R] int64: the tokens that constraints have left, V where there is none. A row from which filters cut nothing more has an empty
    mask. None: V everywhere."""


class Mask(NamedTuple):
    """The vocabulary that filters kept: the tokens over which the distribution of each row was normalised.

    An empty row is one from which filters cut nothing: one without filters, a greedy one, one whose filters kept everything, one that
    was not asked for. It cannot be mistaken for a row that keeps nothing, because at least one token is always kept. A row that is
    not finite is empty too.
    """

    token_ids: np.ndarray
    """[M] int32, ascending in each row"""
    offsets: np.ndarray
    """[R + 1] int64: row r holds token_ids[offsets[r]:offsets[r + 1]]"""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """`finite` is False for rows whose logits held NaN or infinity; their token and log-probs mean nothing."""

    tokens: np.ndarray
    """[R] int64"""
    logprobs: np.ndarray
    """[R] float64"""
    finite: np.ndarray
    """[R] bool"""
    mask: Mask | None = None
    top_ids: np.ndarray | None = None
    """[R, top] int32, most probable first; -1 where the distribution has fewer tokens."""
    top_logprobs: np.ndarray | None = None
    """[R, top] float64; -inf if there is no token."""


class RowScores(NamedTuple):
    """The log-probs of given tokens at temperature 1, one per row."""

    logprobs: np.ndarray
    """[R] float64; not a number where the logits hold NaN or infinity."""
    top_ids: np.ndarray | None
    """[R, top] int32, most probable first, as in `Drawn`; None if none were asked for."""
    top_logprobs: np.ndarray | None
    """[R, top] float64"""


def uniforms(seed: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that depend on (seed, counter) alone: splitmix64 (Steele, Lea & Flood, OOPSLA 2014), whose stream
    for a seed can be entered anywhere. The seed is mixed first, so that neighbouring seeds share nothing."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        state = _mix(seed.astype(np.uint64) + golden) + golden * (counter.astype(np.uint64) + np.uint64(1))
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
