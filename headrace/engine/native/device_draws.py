"""Filters and draws of rows where their logits are, for devices on which every copy to the host is waited for.

The kept set is that of `sampler.keep`, and a token is the one that `sampler` draws with the same random number, up to the rounding of float64 sums.
No shape depends on a value: of each row the largest logits are looked at, as many as `CANDIDATES`, and rows that would need more are told.

Legend: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headrace.engine.native.draws import BELOW_ONE, LOWEST

CANDIDATES = 1024
"""Largest logits of a row that are looked at first. Top-p 0.95 of a trained model keeps tens of tokens; a row that keeps more than these is computed
again from all of its logits."""


class KeptRows(NamedTuple):
    """The tokens that filters kept of each row, and the one that was drawn of them."""

    tokens: torch.Tensor
    """[R] int64"""
    chosen: torch.Tensor
    """[R] float64: their logits"""
    norm: torch.Tensor
    """[R] float64: the sum of the kept weights exp((x - peak) / temperature)"""
    counts: torch.Tensor
    """[R] int64: tokens that were kept"""
    ids: torch.Tensor
    """[R, C] int64: these tokens, ascending; V behind them"""
    short: torch.Tensor
    """[R] bool: there were too few candidates. All else of such a row means nothing."""


class FilterColumns(NamedTuple):
    """Values of the filters of rows, and their random numbers, [R] each."""

    top_k: torch.Tensor
    """int64; 0: off"""
    top_p: torch.Tensor
    """float64; 1: off"""
    below: torch.Tensor
    """float64: temperature · log(min-p), by which a kept logit is at most below the largest; -inf: off"""
    temperature: torch.Tensor
    """float64"""
    u: torch.Tensor
    """float64"""


def draw_filtered(
    x: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, filters: FilterColumns, most: int = CANDIDATES
) -> KeptRows:
    """x [R, V] logits; peak [R] float64, the largest of each; total [R] float64, the sum of all weights, at which only rows look whose top-p is a share
    of it. Nothing in here waits for a GPU."""
    vocabulary = x.shape[1]
    size = min(most, vocabulary)
    ordered, ids = x.float().topk(size, dim=-1)
    wide, peak, temperature = ordered.double(), peak[:, None], filters.temperature[:, None]
    threshold, found = _thresholds(wide, peak, total, filters)
    kept = wide >= threshold[:, None]
    complete = found & ~kept[:, -1] if size < vocabulary else torch.ones_like(found)
    ids = torch.where(kept, ids, vocabulary).sort(-1).values
    logits = x.gather(1, ids.clamp(max=vocabulary - 1)).double()
    weights = ((logits - peak) / temperature).exp_().masked_fill_(ids == vocabulary, 0.0)
    sums, counts = weights.cumsum(-1), kept.sum(-1)
    norm = sums[:, -1]
    target = (filters.u.clamp(max=BELOW_ONE) * norm)[:, None]
    place = torch.searchsorted(sums, target, right=True)[:, 0]
    place = torch.minimum(place, counts - 1).clamp_(min=0)[
        :, None
    ]  # a scan on a GPU may round down behind the last one
    tokens = ids.gather(1, place)[:, 0].clamp(max=vocabulary - 1)  # rows of NaN keep nothing
    return KeptRows(
        tokens=tokens,
        chosen=logits.gather(1, place)[:, 0],
        norm=norm,
        counts=counts,
        ids=ids,
        short=~complete & peak[:, 0].isfinite(),
    )


def _thresholds(
    ordered: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, filters: FilterColumns
) -> tuple[torch.Tensor, torch.Tensor]:
    """([R] float64, the logit of the last token kept in each row; [R] bool, whether the candidates were enough to find it). ordered [R, C] float64,
    largest first; peak [R, 1]."""
    size, k = ordered.shape[1], filters.top_k
    kth = ordered.gather(1, (k.clamp(1, size) - 1)[:, None])[:, 0]
    kth = torch.where(k > 0, kth, -torch.inf)
    mass = ((ordered - peak) / filters.temperature[:, None]).exp_()
    mass = mass.masked_fill_(ordered < kth[:, None], 0.0).cumsum(-1)
    reached = mass >= (filters.top_p * torch.where(k > 0, mass[:, -1], total))[:, None]
    # Rounding can keep the sum of all below top_p: then all are kept.
    last = torch.where(reached[:, -1], reached.int().argmax(-1), size - 1)
    by_mass = torch.maximum(kth, ordered.gather(1, last[:, None])[:, 0])
    threshold = torch.where(filters.top_p < 1, by_mass, kth)
    threshold = torch.maximum(threshold, peak[:, 0] + filters.below).clamp(min=LOWEST)
    ties = (k == 0) | ((k <= size) & (ordered[:, -1] < kth))  # those of the k-th are all there
    return threshold, ties & ((filters.top_p >= 1) | reached[:, -1])
