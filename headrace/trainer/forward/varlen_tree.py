"""A pack's attention as one call of a varlen kernel (`native/cuda_ops.py`): for CUDA, where many small calls and large masks are slow.

Every segment is a sequence of its own: its keys are those of its ancestors, followed by its own. The kernel aligns the causal triangle at
the lower right, so it needs no mask. Key i of a segment has position i, so windows are right too. Keys and values of ancestors are copied
for each descendant, which costs little beside the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from headrace.native.cuda_ops import Kernel, Layout
from headrace.trainer.packing import ROOT, Segment


@dataclass(kw_only=True)
class Varlen(Layout):
    """The layout of one call."""

    source: Tensor
    """[K] int64: the place in the pack of every key."""

    def attend(
        self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        """[1, H, N, D], twice [1, H_kv, N, D] -> [1, N, H, D]"""
        # under autocast, rotary embeddings leave q and k in float32 and v in half precision
        q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        with torch.autocast(q.device.type, enabled=False):
            out = kernel(
                q.contiguous(),
                k.index_select(0, self.source),
                v.index_select(0, self.source),
                self,
                scale=scaling,
                reach=window or 0,
            )
        return out[None]


def varlen_of(segments: Sequence[Segment], device: torch.device) -> Varlen:
    chains: list[list[Segment]] = []
    for segment in segments:
        chains.append([segment] if segment.parent == ROOT else [*chains[segment.parent], segment])
    lengths = [sum(one.length for one in chain) for chain in chains]
    source = torch.cat([torch.arange(one.start, one.end) for chain in chains for one in chain])
    query_starts, key_starts = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        for counts in ([segment.length for segment in segments], lengths)
    )
    return Varlen(
        source=source.to(device),
        query_starts=query_starts,
        key_starts=key_starts,
        longest_query=max(segment.length for segment in segments),
        longest_key=max(lengths),
    )
