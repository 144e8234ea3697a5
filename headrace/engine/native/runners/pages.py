"""The facts of a pass that a kernel which reads pages where they lie must be told.

The work of a pass is cut into tiles: a stretch of queries of one segment. Decoding rows are tiles of one query, whose keys several programs
share; chunks of prompts are tiles of so many queries that a program's products have `ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

ROWS = 64
"""Rows of the products of one program in a chunk: queries times query heads of one key head."""
PROGRAMS = 4
"""Programs for each processor of a GPU, up to which the keys of decoding rows are split."""
MOST_SPLITS = 32


class Softmax(NamedTuple):
    """The changes that a model makes to the scores of its attention beside scaling them."""

    cap: float | None = None
    """Scores x become cap * tanh(x / cap) (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """[Hq]: a score of each head that every query sees beside its keys, and that has no value (GPT-OSS)."""

    @property
    def plain(self) -> bool:
        return self.cap is None and self.sinks is None


PLAIN = Softmax()


def weights_of(scores: torch.Tensor, seen: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """scores [..., Hq, n, T], seen [..., n, T] -> what each query takes of each value, of one dtype."""
    if softmax.cap is not None:
        scores = softmax.cap * torch.tanh(scores / softmax.cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if softmax.sinks is None:
        return scores.softmax(-1)
    sinks = softmax.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Tiles:
    """One launch of the kernel."""

    places: torch.Tensor
    """[T, 2] int32: segment, and the tile's first query in it; segment -1: nothing to do"""
    queries: int
    """Queries of a tile."""
    splits: int = 1
    """Programs that share the keys of a tile; more than one for single queries only."""
    all_tokens: bool = False
    """Whether every token of the pass is in one of these tiles."""


@dataclass(frozen=True)
class Pages:
    """The segments of one pass."""

    starts: torch.Tensor
    """[S + 1] int32: the queries of segment s are [starts[s], starts[s + 1])."""
    lengths: torch.Tensor
    """[S] int32: keys of each segment, those of its own queries included."""
    tables: torch.Tensor
    """[S, W] int32: its pages in order."""
    tiles: Sequence[Tiles]


class PageKernel(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: Pages,
        /,
        *,
        scale: float,
        window: int | None,
        softmax: Softmax,
    ) -> torch.Tensor:
        """q [N, Hq, D] as `side_by_side` returns it, keys and values [pages, BLOCK, Hkv, D] of one dtype -> [N, Hq, D]. Tokens that are in no tile get
        zeros.

        `window`: a query sees itself and the window - 1 keys before it.
        """
        ...


def side_by_side(q: torch.Tensor) -> torch.Tensor:
    """q [N, Hq, D] in which the heads of a token lie behind each other. A copy only where the model has left them head by head: those that rotate a part of
    each head do."""
    return q if q[:1].is_contiguous() else q.contiguous()


def tile_queries(group: int) -> int:
    """Queries of one tile of a chunk. `group`: query heads of one key head."""
    return max(1, ROWS // group)


def places(sizes: np.ndarray, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments of one token, and of more: their tiles [T, 2] int32 each. `sizes` [S]: tokens of each segment; 0: no tile."""
    alone = np.flatnonzero(sizes == 1)
    longer = np.flatnonzero(sizes > 1)
    counts = -(-sizes[longer] // queries)
    ends = np.cumsum(counts)
    first = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    single = np.stack([alone, np.zeros_like(alone)], 1)
    chunks = np.stack([np.repeat(longer, counts), first * queries], 1)
    return single.astype(np.int32), chunks.astype(np.int32)


def splits(tiles: int, kv_heads: int, processors: int) -> int:
    """Programs that share the keys of one decoding row: so many that all processors have work, 1 where rows alone do that."""
    return min(MOST_SPLITS, max(1, PROGRAMS * processors // max(1, tiles * kv_heads)))


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
