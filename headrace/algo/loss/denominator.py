"""`algo.denominator = kept`: what a rule took out leaves the denominator of the whole step too (C9).

What a rule takes out is known after its microbatch was forwarded, and the weights of a step are fixed before. So a microbatch is
weighed by what was packed, and the difference made up for: within a row at once, because rows are whole; of the step at its end, by
one factor on the gradient that all microbatches and ranks have added to. Both are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.algo.policy.tokens import sequence_sum
from headrace.algo.recipe_parts import Aggregation


@dataclass
class Kept:
    """What of a step is kept. Sums over microbatches."""

    aggregation: Aggregation
    tokens: int = 0
    kept_tokens: int = 0
    rows: int = 0
    """With loss tokens."""
    kept_rows: int = 0
    """With a token that was kept."""

    def within_rows(self, sequence: Tensor, rejected: Tensor) -> Tensor:
        """[M] what a microbatch's weights are multiplied by at once. Counts what it keeps."""
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
        """On the gradient of the whole step."""
        if self.aggregation == "token_mean":
            return self.tokens / max(self.kept_tokens, 1)
        return self.rows / max(self.kept_rows, 1)
