"""`algo.denominator = kept`: what a rule took out leaves the denominator of the whole step too (C9).

The weights of a step are fixed before its first microbatch, and what a rule takes out is known only after a microbatch was forwarded.
So a microbatch is weighed by what was packed, and corrected afterwards: within a row at once, because rows are whole; over the step at
its end, by one factor on the gradient that all microbatches and ranks have added to. Both are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.algo.policy.tokens import sequence_sum
from headrace.algo.recipe_parts import Aggregation

COUNTS = ("tokens", "kept_tokens", "rows", "kept_rows")
"""The fields that add up over ranks."""


@dataclass
class KeptCounts:
    """The kept part of a step, summed over its microbatches (and ranks)."""

    aggregation: Aggregation
    tokens: int = 0
    kept_tokens: int = 0
    rows: int = 0
    """Rows with loss tokens."""
    kept_rows: int = 0
    """Rows with a token that was kept."""

    def within_rows(self, sequence: Tensor, rejected: Tensor) -> Tensor:
        """[M] the factors on the microbatch's weights that are known at once. Counts what it keeps."""
        kept = (~rejected).to(torch.float32)
        of_row, kept_of_row = sequence_sum(torch.ones_like(kept), sequence), sequence_sum(kept, sequence)
        self.tokens += len(kept)
        self.kept_tokens += int(kept.sum())
        self.rows += len(sequence.unique())
        self.kept_rows += len(sequence[~rejected].unique())
        if self.aggregation != "seq_mean_token_mean":
            return torch.ones_like(kept)
        return of_row / torch.clamp(kept_of_row, min=1)

    @property
    def factor(self) -> float:
        """The factor on the gradient of the whole step."""
        if self.aggregation == "token_mean":
            return self.tokens / max(self.kept_tokens, 1)
        return self.rows / max(self.kept_rows, 1)
