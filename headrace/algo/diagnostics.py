"""Sampler against trainer, by lag: how far off policy the loss tokens of a step were.

All values are sums (or maxima) over tokens: microbatches and ranks add up to exactly the result of one pass over all
tokens. Quantiles are read off a fixed histogram of log-spaced bins, 512 from 1e-6 to 40, and are right to within 3.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.algo.policy.tokens import TokenLoss, Tokens, k3, ratio_of, sequence_mean, sequence_sum
from headrace.algo.recipes import REASONS
from headrace.core.reports import LagStats, Noise

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


LAGS = (1.0, 2.0, 3.0)
"""Edges between the buckets 0, 1, 2, 3+."""
NAMES = ("0", "1", "2", "3+", "swapped", "experience")
BINS, LEAST, MOST = 512, 1e-6, 40.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SUMS = ("tokens", "ratio", "squared", "kl", "clipped", *REASONS)


Reduction = Callable[[Tensor], Tensor]


class Diagnostics:
    """Sums over the loss tokens of one optimizer step."""

    def __init__(self) -> None:
        self.sums = torch.zeros(len(NAMES), len(_SUMS), dtype=torch.float64)
        self.histogram = torch.zeros(len(NAMES), BINS, dtype=torch.float64)
        self.peak = torch.zeros(len(NAMES), dtype=torch.float64)
        """`sums` and `histogram` of all ranks add up, `peak` is the maximum over them."""
        self.rounding = torch.zeros(4, dtype=torch.float64)
        """Sums at lag 0: tokens, Σ gap²; sequences, Σ (mean gap)²."""

    def add(self, tokens: Tokens, result: TokenLoss, apart: Int[Tensor, " M"]) -> None:
        """Adds tokens. `apart` [M]: 0 for a token that counts by its lag; 1 if more than one version sampled its sequence, 2 if that is of an earlier
        group, which count in these buckets alone."""
        logprob, sampled = tokens.logprob.detach().cpu().double(), tokens.sampled.cpu().double()
        edges = torch.tensor(LAGS, dtype=tokens.lag.dtype)
        bucket = torch.bucketize(tokens.lag.cpu(), edges, right=True)
        others = apart.cpu().long()
        bucket = torch.where(others > 0, len(LAGS) + others, bucket)
        ratio = ratio_of(logprob, sampled)
        nothing = torch.zeros_like(ratio)
        rules = [result.masked[rule].cpu().double() if rule in result.masked else nothing for rule in REASONS]
        clipped = result.clipped.cpu().double()
        columns = [torch.ones_like(ratio), ratio, ratio**2, k3(logprob, sampled), clipped, *rules]
        self.sums.index_add_(0, bucket, torch.stack(columns, dim=1))
        gap = (logprob - sampled).abs()
        self.histogram.index_put_((bucket, _bin_of(gap)), torch.ones_like(gap), accumulate=True)
        self.peak.scatter_reduce_(0, bucket, gap, "amax")
        self.rounding += _rounding(logprob - sampled, tokens.sequence.cpu(), tokens.lag.cpu() == 0)

    def combine(self, add: Reduction, largest: Reduction) -> None:
        """Replaces the sums of one rank by those of all ranks. Both functions work elementwise over the ranks."""
        parts = (self.sums, self.histogram, self.rounding)
        added = add(torch.cat([part.flatten() for part in parts])).split([part.numel() for part in parts])
        self.sums, self.histogram, self.rounding = (new.view(old.shape) for new, old in zip(added, parts, strict=True))
        self.peak = largest(self.peak)

    def join(self, other: Diagnostics) -> None:
        """Adds the sums of a later update of the step. What rounding makes is known from the first one alone: the weights have changed since."""
        self.sums += other.sums
        self.histogram += other.histogram
        self.peak = torch.maximum(self.peak, other.peak)

    def report(self, passes: int = 1) -> tuple[LagStats, ...]:
        """Returns the buckets that have tokens, by lag, those that have none of their own last. `passes`: the number of updates in which each token was."""
        return tuple(self._of(i, passes) for i in range(len(NAMES)) if self.sums[i, 0] > 0)

    def noise(self) -> Noise | None:
        """None without tokens of lag 0."""
        tokens, squares, sequences, of_means = self.rounding.tolist()
        if not tokens:
            return None
        return Noise(int(tokens), (squares / tokens) ** 0.5, int(sequences), (of_means / max(sequences, 1)) ** 0.5)

    def _of(self, i: int, passes: int) -> LagStats:
        total = dict(zip(_SUMS, self.sums[i].tolist(), strict=True))
        count, peak = total["tokens"], float(self.peak[i])
        gaps = {name: min(self._quantile(i, share), peak) for name, share in QUANTILES.items()}
        return LagStats(
            name=NAMES[i],
            tokens=int(count) // passes,
            ratio=total["ratio"] / count,
            kl=total["kl"] / count,
            ess=total["ratio"] ** 2 / (count * total["squared"]),
            chi2=(total["squared"] - 2 * total["ratio"]) / count + 1,
            clipped=total["clipped"] / count,
            masked={rule: total[rule] / count for rule in REASONS if total[rule]},
            gaps={**gaps, "max": peak},
        )

    def _quantile(self, i: int, share: float) -> float:
        """Returns the middle of the bin that holds it; 0 for the bin of negligible gaps."""
        cumulative = torch.cumsum(self.histogram[i], 0)
        place = int(torch.searchsorted(cumulative, cumulative[-1] * share))
        return LEAST * (MOST / LEAST) ** ((place - 0.5) / (BINS - 1)) if place else 0.0


def _rounding(gap: Float[Tensor, " M"], sequence: Int[Tensor, " M"], fresh: Bool[Tensor, " M"]) -> Float[Tensor, " 4"]:
    """[4] see `Diagnostics.rounding`. Each of n tokens of a sequence counts as 1/n of it."""
    whole = sequence_sum((~fresh).double(), sequence) == 0
    share = 1 / sequence_sum(torch.ones_like(gap), sequence)[whole]
    means = sequence_mean(gap, sequence)[whole]
    return torch.stack([fresh.sum(), (gap[fresh] ** 2).sum(), share.sum().round(), (means**2 * share).sum()])


def _bin_of(gap: Float[Tensor, " M"]) -> Int[Tensor, " M"]:
    """0 for gaps below LEAST, the last for those above MOST."""
    place = torch.log(torch.clamp(gap, LEAST / 2, MOST) / LEAST) / math.log(MOST / LEAST) * (BINS - 1)
    return torch.clamp(torch.floor(place).long() + 1, 0, BINS - 1)
