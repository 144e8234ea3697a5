"""Computes exactly which tokens top-k, top-p and min-p keep, without sorting the vocabulary.

    logits [R, V] ──▶ maxima of groups of tokens ──▶ cut: surely not above the last token kept ──▶ candidates ──▶ threshold
                      one pass, sorted: few             a bound from the maxima                     few, sorted, in float64

The passes over the vocabulary run where the logits are, what is decided among the candidates is decided in numpy. Everything
is done with logits as they come: temperature enters where probabilities do, so that no two tokens become equal by rounding.

Legend: R rows, V vocabulary, M candidates of all rows together, C those of the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from headrace.native.memory import uploaded

GROUP = 16
"""Tokens of one group. Small: the maxima leave out little probability. Large: there are few of them to sort."""

LOWEST = float(torch.finfo(torch.float32).min)
"""A cut here lets everything through but tokens of logit -inf, which the model itself forbids."""

_SMALL, _LARGE = 1 << 13, 1 << 18
"""Entries of a padded table: below the first padding costs less than one more table, more than the second leave the cache."""


@dataclass(frozen=True)
class Ragged:
    """Tokens of several rows, ascending by id in each: row r holds [offsets[r], offsets[r + 1])."""

    offsets: np.ndarray
    """[R + 1] int64"""
    ids: np.ndarray
    """[M] int64"""
    logits: np.ndarray
    """[M] float32"""

    def counts(self) -> np.ndarray:
        return np.diff(self.offsets)

    def where(self, kept: np.ndarray) -> Ragged:
        """The tokens for which kept [M] is True."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return Ragged(before[self.offsets], self.ids[kept], self.logits[kept])

    def rows(self, chosen: np.ndarray) -> Ragged:
        """The rows for which chosen [R] is True; the others become empty."""
        return self if chosen.all() else self.where(np.repeat(chosen, self.counts()))

    def tables(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, logits [rows, C] with -inf behind the end of each): all rows that are not empty, some at a time."""
        counts = self.counts()
        left = np.flatnonzero(counts)
        left = left[np.argsort(counts[left], kind="stable")]  # long rows together, so that little is padding
        while len(left):
            padded = np.arange(1, len(left) + 1) * counts[left]
            wide = padded > np.clip(2 * np.cumsum(counts[left]), _SMALL, _LARGE)
            rows, left = np.split(left, [max(1, int(wide.argmax())) if wide.any() else len(left)])
            columns = np.arange(counts[rows[-1]])
            places = self.offsets[rows, None] + np.minimum(columns, counts[rows, None] - 1)
            yield rows, np.where(columns < counts[rows, None], self.logits[places], np.float32(-np.inf))


def concatenated(parts: list[Ragged]) -> Ragged:
    counts = np.concatenate([[0], *(part.counts() for part in parts)])
    ids, logits = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "logits"))
    return Ragged(np.cumsum(counts), ids, logits)


@dataclass(frozen=True)
class Filters:
    """One value per row. A row of top_k 0, top_p 1 and min_p 0 keeps everything."""

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

    def needs_total(self) -> np.ndarray:
        """[R] whether the sum over the whole vocabulary matters: not where the tokens kept say it all."""
        return ~self.on() | ((self.top_k == 0) & (self.top_p < 1))

    def at(self, rows: np.ndarray | slice) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def cuts(maxima: torch.Tensor, total: torch.Tensor, filters: Filters, at_least: int) -> np.ndarray:
    """[R] float32: a logit not above that of the last token kept; in rows without filters, of the `at_least` most probable ones.

    maxima [R, V / GROUP] float32, those of groups of tokens. total [R] float64, the sum of exp((x - max) / temperature), which
    only rows that `needs_total` look at. Not a number where the maximum is not finite.

    - top-k: the k-th largest of maxima, as k tokens at least reach it.
    - top-p: the first of the maxima whose probabilities sum to top_p; where all of them together do not, the logit below which
      V tokens cannot sum to 1 - top_p.
    - min-p: its own threshold. Not beside top-k, whose sum needs all k tokens.
    """
    maxima = _descending(maxima)
    k, groups = np.where(filters.on(), filters.top_k, at_least), maxima.shape[1]
    column = uploaded(np.clip(k, 1, groups) - 1, maxima.device)
    found = torch.stack([maxima[:, 0], maxima.gather(1, column[:, None])[:, 0]]).cpu().numpy()
    peak, kth = found.astype(np.float64)
    cut = np.where((k > 0) & (k <= groups), kth, LOWEST)
    alone = filters.on() & (k == 0)
    if alone.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = np.log((1 - filters.top_p) * total.cpu().numpy() / (groups * GROUP))
            lower = peak + filters.temperature * np.maximum(bound, np.log(filters.min_p))
        lower = np.maximum(lower, _reach(maxima, total, filters, alone))
        cut = np.where(alone, np.nextafter(lower.astype(np.float32), np.float32(-np.inf)), cut)
    cut = np.maximum(cut, LOWEST)
    return np.where(np.isfinite(peak), cut, np.nan).astype(np.float32)


def above(x: torch.Tensor, cut: np.ndarray) -> Ragged:
    """The tokens of x [R, V] float32 that reach the cut of their row. numpy compares with AVX-512: 5 times faster on a CPU."""
    if x.device.type == "cpu":
        places = np.flatnonzero(x.numpy() >= cut[:, None])
        logits = x.numpy().reshape(-1)[places]
    else:
        found = (x >= uploaded(cut, x.device, np.float32)[:, None]).view(-1).nonzero()[:, 0]
        places, logits = found.cpu().numpy(), x.reshape(-1)[found].cpu().numpy()
    rows, width = x.shape
    offsets = np.searchsorted(places, np.arange(rows + 1) * width)
    return Ragged(offsets, places - np.repeat(np.arange(rows) * width, np.diff(offsets)), logits)


def _descending(maxima: torch.Tensor) -> torch.Tensor:
    """Sorted along the last axis. numpy sorts with AVX-512: 25 times faster than torch on a CPU."""
    if maxima.device.type != "cpu":
        return maxima.sort(-1, descending=True).values
    return torch.from_numpy(np.negative(np.sort(np.negative(maxima.numpy()), axis=-1)))


def _reach(maxima: torch.Tensor, total: torch.Tensor, filters: Filters, rows: np.ndarray) -> np.ndarray:
    """[R] the first of the maxima at which they sum to top_p; -inf where they never do."""
    reach = np.full(len(maxima), -np.inf)
    rows = np.flatnonzero(rows & (filters.top_p < 1))
    if len(rows):
        index = uploaded(rows, maxima.device)
        temperature, top_p = (
            uploaded(c[rows, None], total.device, np.float64) for c in (filters.temperature, filters.top_p)
        )
        sorted_ = maxima[index]
        mass = ((sorted_ - sorted_[:, :1]) / temperature.float()).exp_().cumsum(-1, dtype=torch.float64)
        # Rounded up: these are float32 terms, and a cut that is too low costs a few candidates only.
        column = torch.searchsorted(mass, top_p * total[index, None] * (1 + 1e-5))
        found = sorted_.gather(1, column.clamp(max=maxima.shape[1] - 1))
        reach[rows] = found.masked_fill_(column == maxima.shape[1], -torch.inf)[:, 0].cpu().numpy()
    return reach


def keep(near: Ragged, peak: np.ndarray, total: np.ndarray, filters: Filters) -> Ragged:
    """Applies top-k, then top-p and then min-p to the tokens that are left. Ties with the last kept token are kept.

    near: what is `above` the `cuts` of these rows; peak [R] their maxima and total [R] as there, float64.
    """
    threshold = np.full(len(peak), -np.inf)
    for rows, table in near.tables():
        threshold[rows] = _thresholds(table, near.counts()[rows], peak[rows], total[rows], filters.at(rows))
    return near.where(near.logits >= np.repeat(threshold, near.counts()))


def _thresholds(
    table: np.ndarray, count: np.ndarray, peak: np.ndarray, total: np.ndarray, filters: Filters
) -> np.ndarray:
    """[R] float64: the logit of the last token kept in each row of a table [R, C] of candidates."""
    ordered = np.negative(np.sort(np.negative(table), axis=-1))
    place = np.arange(len(table))
    k = filters.top_k
    kth = np.where(k > 0, ordered[place, np.clip(k, 1, count) - 1], -np.inf)
    threshold = kth
    if (filters.top_p < 1).any():
        mass = np.exp((ordered - peak[:, None]) / filters.temperature[:, None])
        mass[ordered < kth[:, None]] = 0.0
        mass.cumsum(axis=-1, out=mass)
        reached = mass >= (filters.top_p * np.where(k > 0, mass[:, -1], total))[:, None]
        # Rounding can keep the sum of all below top_p: then all are kept.
        last = np.where(reached[:, -1], reached.argmax(-1), count - 1)
        threshold = np.where(filters.top_p < 1, np.maximum(kth, ordered[place, last]), kth)
    with np.errstate(divide="ignore"):
        return np.maximum(threshold, peak + filters.temperature * np.log(filters.min_p))
