"""Attention over pages as the engine's kernel promises to compute it, tile by tile."""

from __future__ import annotations

import torch

from headrace.engine.native.forward_pass import BLOCK


def read_pages(q, keys, values, pages, /, *, scale, window, softmax):
    """What the kernel promises to compute, over the tiles that it is told of."""
    assert {pages.starts.dtype, pages.lengths.dtype, pages.tables.dtype} == {torch.int32}
    assert q[0].is_contiguous()
    starts, lengths, out = pages.starts.tolist(), pages.lengths.tolist(), torch.zeros_like(q)
    seen: list[int] = []
    for tiles in pages.tiles:
        assert tiles.splits == 1 or tiles.queries == 1
        for segment, first in tiles.places.tolist():
            if segment < 0:
                continue
            count = starts[segment + 1] - starts[segment]
            numbers = pages.tables[segment, : -(-lengths[segment] // BLOCK)].long()
            k, v = (x[numbers].flatten(0, 1).repeat_interleave(q.shape[1] // x.shape[2], 1) for x in (keys, values))
            stop = min(first + tiles.queries, count)
            last = torch.arange(first, stop)[:, None] + lengths[segment] - count
            at = torch.arange(len(k))[None]
            hidden = (at > last) | (at <= last - (window or len(k)))
            mine = slice(starts[segment] + first, starts[segment] + stop)
            scores = torch.einsum("nhd,thd->hnt", q[mine], k) * scale
            if softmax.cap is not None:
                scores = softmax.cap * torch.tanh(scores / softmax.cap)
            weights = scores.masked_fill(hidden, -torch.inf).exp()
            sunk = 0 if softmax.sinks is None else softmax.sinks.exp()[:, None, None]
            weights = weights / (weights.sum(-1, keepdim=True) + sunk)
            out[mine] = torch.einsum("hnt,thd->nhd", weights, v.masked_fill(hidden.all(0)[:, None, None], 0))
            seen += range(mine.start, mine.stop)
    assert len(set(seen)) == len(seen)
    if any(tiles.all_tokens for tiles in pages.tiles):
        assert len(pages.tiles) == 1 and sorted(seen) == list(range(len(q)))
    return out
