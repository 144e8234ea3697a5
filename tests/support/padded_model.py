"""A model's forward pass, row by row and padded."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.native.cuda_ops import Layout


class Padded:
    """A varlen kernel in plain torch: every sequence's causal triangle is aligned at the lower right (or, wrongly, the upper left)."""

    def __init__(self, lower_right: bool = True) -> None:
        self.lower_right = lower_right

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, scale: float | None, reach: int) -> Tensor:
        outputs = []
        for i in range(len(layout.query_starts) - 1):
            queries, keys = (slice(*starts[i : i + 2].tolist()) for starts in (layout.query_starts, layout.key_starts))
            count, total = queries.stop - queries.start, keys.stop - keys.start
            assert count <= layout.longest_query and total <= layout.longest_key
            shift = total - count if self.lower_right else 0
            distance = torch.arange(shift, shift + count)[:, None] - torch.arange(total)
            hidden = (distance < 0) | (distance >= (reach or total))
            mine, theirs, values = (x[s].transpose(0, 1).double() for x, s in ((q, queries), (k, keys), (v, keys)))
            theirs, values = (x.repeat_interleave(len(mine) // len(x), 0) for x in (theirs, values))
            scores = mine @ theirs.transpose(1, 2) * (scale or q.shape[2] ** -0.5)
            outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(2) @ values).transpose(0, 1))
        return torch.cat(outputs).to(q.dtype)
