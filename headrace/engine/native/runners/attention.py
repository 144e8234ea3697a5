"""Attention over a paged KV cache, for every runner without kernels of its own.

Segments of one token (decoding) go through one call for all: their blocks are gathered by the block table, and positions after
a sequence's end are masked. Longer segments (chunks of prompts) are one causal call each. On CUDA in half precision a kernel reads the
pages where they lie (`pages.py`); where it does not run, one call serves all segments, over keys that are gathered behind each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.runners.page_trial import page_kernel
from headrace.engine.native.runners.pages import (
    PLAIN,
    Pages,
    Softmax,
    Tiles,
    places,
    processors,
    side_by_side,
    splits,
    tile_queries,
    weights_of,
)
from headrace.native.cuda_ops import Layout, varlen_kernel
from headrace.native.uploads import uploaded, uploaded_together

EXACT_BLOCKS = 4
"""Blocks that attention takes at a time in exact mode."""
QUERIES = 256
"""Queries whose scores are written out at a time."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's attention."""

    layers: int
    heads: int
    """Query heads of a layer."""
    kv_heads: int
    head_dim: int
    plain: bool = True
    """Whether its scores have neither caps nor sinks."""

    def block_nbytes(self, dtype: torch.dtype) -> int:
        return self.layers * 2 * BLOCK * self.kv_heads * self.head_dim * dtype.itemsize


class PagedCache:
    """[L, 2, blocks + 1, BLOCK, Hkv, D]: keys and values. The last block is scratch, which padding writes to."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, exact: bool = False) -> None:
        """`exact`: attention goes in steps of plain PyTorch, and kernels are not looked for."""
        self.geometry, self.dtype, self.device = geometry, dtype, device
        self.kernel = None if exact else page_kernel(device, dtype, geometry.head_dim, geometry.plain)
        self.ragged = (
            None if exact or self.kernel or not geometry.plain else varlen_kernel(device, dtype, geometry.head_dim)
        )
        self.scratch = 0

    def allocate(self, blocks: int) -> None:
        # Zeros and not empty: what lies behind a sequence's end is masked, but 0 * NaN would still be NaN. The system hands
        # out zeroed pages at first touch, so this costs nothing on a CPU.
        layers, heads, dim = self.geometry.layers, self.geometry.kv_heads, self.geometry.head_dim
        self._data = torch.zeros(layers, 2, blocks + 1, BLOCK, heads, dim, dtype=self.dtype, device=self.device)
        self._pages = [(layer[0], layer[1]) for layer in self._data]
        self._blocks = [(keys.flatten(1), values.flatten(1)) for keys, values in self._pages]
        self._tokens = [
            (keys.flatten(0, 1).flatten(1), values.flatten(0, 1).flatten(1)) for keys, values in self._pages
        ]
        self.scratch = blocks

    def free(self) -> None:
        self._data = torch.zeros(0, dtype=self.dtype, device=self.device)
        self._pages, self._blocks, self._tokens = [], [], []

    def take_out(self, blocks: np.ndarray) -> torch.Tensor:
        """[L, 2, n, BLOCK, Hkv, D] in the host's memory."""
        return self._data[:, :, self._index(blocks)].cpu()

    def put_back(self, blocks: np.ndarray, content: torch.Tensor) -> None:
        self._data[:, :, self._index(blocks)] = content.to(self.device)

    def write(self, layer: int, where: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`where` [N]: block * BLOCK + place of each token; keys and values [N, Hkv, D]."""
        for cached, fresh in zip(self._tokens[layer], (keys, values), strict=True):
            cached.index_copy_(0, where, fresh.reshape(len(where), -1).to(self.dtype))

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """blocks [n, w] -> keys and values [n, w * BLOCK, Hkv, D]. Whole blocks by `index_select`: on a CPU seven times
        faster than indexing."""
        shape = (len(blocks), -1, self.geometry.kv_heads, self.geometry.head_dim)
        keys, values = (part.index_select(0, blocks.flatten()).view(shape) for part in self._blocks[layer])
        return keys, values

    def tokens(self, layer: int, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """where [K]: block * BLOCK + place -> keys and values [K, Hkv, D]."""
        shape = (len(where), self.geometry.kv_heads, self.geometry.head_dim)
        keys, values = (part.index_select(0, where).view(shape) for part in self._tokens[layer])
        return keys, values

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [blocks + 1, BLOCK, Hkv, D] where they lie."""
        return self._pages[layer]

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self._data[:, :, self._index(target)] = self._data[:, :, self._index(source)]

    def clear(self, blocks: np.ndarray) -> None:
        self._data[:, :, self._index(blocks)] = 0

    def _index(self, blocks: np.ndarray) -> torch.Tensor:
        return uploaded(blocks, self.device)


@dataclass(frozen=True)
class AttentionChunk:
    """Tokens [start, stop) of the pass, which follow `context` tokens in the blocks of `table`."""

    start: int
    stop: int
    context: int
    table: torch.Tensor


@dataclass(kw_only=True)
class Pass:
    """The inputs of attention in one forward pass. Masks are made once, for all layers."""

    cache: PagedCache
    positions: torch.Tensor
    """[N] int64"""
    where: torch.Tensor
    """[N] int64: where each token's key and value go."""
    single: torch.Tensor | None = None
    """[n] tokens that make a segment alone; None when all do."""
    tables: torch.Tensor | None = None
    """[n, W] int64: the blocks of those; None where a kernel serves all segments."""
    chunks: list[AttentionChunk] = field(default_factory=list)
    exact: bool = False
    """Computes every token alone, a few blocks at a time, so that the order of sums depends only on the token's own context."""
    paged: Pages | None = None
    """Inputs of the kernel that reads pages."""
    ragged: tuple[Layout, torch.Tensor] | None = None
    """Inputs of the kernel over gathered keys: the segments, and [K] int64 where their keys lie in the cache."""
    ahead: torch.Tensor | None = None
    """[N] int64: how many of the tokens behind it in its chunk each token sees, in layers that are called so."""
    _plans: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _masks: dict[tuple[int, int | None, bool], torch.Tensor | None] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        ahead: bool = False,
        softmax: Softmax = PLAIN,
    ) -> torch.Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D] in q's dtype. Writes k and v into the cache first.

        `window`: a token sees itself and the window - 1 tokens before it. `ahead`: a token of an image sees the rest of it.
        """
        self.cache.write(layer, self.where, k, v)
        if self.paged is not None and self.cache.kernel is not None:
            keys, values = self.cache.pages(layer)
            q = side_by_side(q.to(self.cache.dtype))
            return self.cache.kernel(q, keys, values, self.paged, scale=scale, window=window, softmax=softmax)
        assert softmax.plain or not self.cache.geometry.plain
        if self.ragged is not None:
            return self._gathered(layer, q, scale, window)
        if self.single is None:
            return self._decode(layer, q, scale, window, softmax)
        out = torch.empty_like(q)
        if len(self.single):
            out[self.single] = self._decode(layer, q[self.single], scale, window, softmax)
        for index, chunk in enumerate(self.chunks):
            of_chunk = slice(chunk.start, chunk.stop)
            out[of_chunk] = self._chunk(
                layer, index, q[of_chunk], scale=scale, window=window, ahead=ahead, softmax=softmax
            )
        return out

    # -- tokens alone -------------------------------------------------------------------------------------------------------

    def _decode(self, layer: int, q: torch.Tensor, scale: float, window: int | None, softmax: Softmax) -> torch.Tensor:
        blocks, seen = self._plan(window)
        # The query heads of one key head are rows of one small matrix: nothing is repeated.
        heads = q.view(len(q), self.cache.geometry.kv_heads, -1, q.shape[-1])
        if self.exact:
            out = _step_by_step(self.cache, layer, q=heads, blocks=blocks, mask=seen, scale=scale, softmax=softmax)
            return out.view(q.shape).to(q.dtype)
        keys, values = self.cache.gather(layer, blocks)
        if not softmax.plain:
            return _written_out(q[:, None], keys, values, seen[:, None] == 0, scale=scale, softmax=softmax)[:, 0]
        out = scaled_dot_product_attention(
            heads, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen[:, None, None], scale=scale
        )
        return out.reshape(q.shape)

    def _plan(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks [n, w] that the window touches, and a mask [n, w * BLOCK] to be added to the scores."""
        assert self.tables is not None
        if window not in self._plans:
            last = self.positions if self.single is None else self.positions[self.single]
            width = self.tables.shape[1]
            first = torch.zeros_like(last)
            if window is not None:
                first = (last - window + 1).clamp(min=0) // BLOCK
                width = min(width, (window + BLOCK - 2) // BLOCK + 1)
            if self.exact:
                width = -(-width // EXACT_BLOCKS) * EXACT_BLOCKS
            columns = first[:, None] + torch.arange(width, device=last.device)
            # The sequence's own last block is repeated after its end: not even NaN of another sequence may enter.
            blocks = self.tables.gather(1, columns.minimum(last[:, None] // BLOCK))
            keys = (columns[..., None] * BLOCK + torch.arange(BLOCK, device=last.device)).flatten(1)
            self._plans[window] = blocks, self._mask(_visible(keys, last[:, None], window))
        return self._plans[window]

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self.exact else self.cache.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)

    # -- chunks -------------------------------------------------------------------------------------------------------------

    def _chunk(
        self,
        layer: int,
        index: int,
        q: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        ahead: bool,
        softmax: Softmax,
    ) -> torch.Tensor:
        chunk = self.chunks[index]
        length = chunk.context + len(q)
        keys, values = self.cache.gather(layer, chunk.table[None])
        mask = self._chunk_mask(index, window, ahead)
        if not softmax.plain:
            seen = q.new_ones(len(q), length, dtype=torch.bool).tril() if mask is None else mask == 0
            keys, values = keys[:, :length], values[:, :length]
            return _written_out(q[None], keys, values, seen[None], scale=scale, softmax=softmax)[0]
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[:, :length].transpose(1, 2),
            values[:, :length].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[2],
        )
        return out[0].transpose(0, 1)

    def _chunk_mask(self, index: int, window: int | None, ahead: bool) -> torch.Tensor | None:
        """[n, context + n] to be added to the scores; None where plain causality says it all."""
        key, chunk = (index, window, ahead), self.chunks[index]
        if key not in self._masks:
            queries = self.positions[chunk.start : chunk.stop, None]
            length = chunk.context + len(queries)
            further = self.ahead[chunk.start : chunk.stop, None] if ahead and self.ahead is not None else None
            plain = chunk.context == 0 and (window is None or window >= length)
            plain = plain and (further is None or not bool(further.any()))
            keys = torch.arange(length, device=queries.device)[None]
            self._masks[key] = None if plain else self._mask(_visible(keys, queries, window, further))
        return self._masks[key]

    # -- all segments in one call -------------------------------------------------------------------------------------------

    def _gathered(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        assert self.ragged is not None and self.cache.ragged is not None
        layout, where = self.ragged
        keys, values = self.cache.tokens(layer, where)
        return self.cache.ragged(q.to(self.cache.dtype), keys, values, layout, scale=scale, reach=window or 0)


def plan_pass(batch: ForwardInput, cache: PagedCache, exact: bool = False) -> Pass:
    """Returns the inputs of attention for a batch, on the cache's device."""

    def move(array: np.ndarray, dtype: type = np.int64) -> torch.Tensor:
        return uploaded(array, cache.device, dtype)

    positions, segments, sizes = batch.positions(), batch.segments(), np.diff(batch.starts)
    batch = replace(batch, tables=batch.tables[:, : positions.max() // BLOCK + 1])  # a caller's tables may be wider
    where = batch.tables[segments, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    kernels = batch.ahead is None  # they know causal attention alone
    assert batch.ahead is None or not batch.ahead[batch.starts[1:] - 1].any(), "an image is forwarded to its end"
    if cache.kernel is not None and kernels:
        return _read_in_place(batch, cache, positions, where)
    made = partial(Pass, cache=cache, positions=move(positions), where=move(where))
    if exact:
        assert kernels, "a piece of fixed size may end within an image"
        return made(tables=move(batch.tables[segments]), exact=True)
    ends = batch.context + sizes
    if cache.ragged is not None and kernels:
        key_starts, source = _keys(batch, ends)
        longest = int(sizes.max()), int(ends.max())
        layout = Layout(move(batch.starts, np.int32), move(key_starts, np.int32), *longest)
        return made(ragged=(layout, move(source)))
    alone = np.flatnonzero(sizes == 1)
    chunks = [
        AttentionChunk(
            int(batch.starts[s]),
            int(batch.starts[s + 1]),
            int(batch.context[s]),
            move(batch.tables[s, : -(-ends[s] // BLOCK)]),
        )
        for s in np.flatnonzero(sizes > 1)
    ]
    tables = batch.tables if len(alone) == len(sizes) else batch.tables[alone]
    ahead = None if batch.ahead is None else move(batch.ahead)
    return made(single=move(batch.starts[alone]) if chunks else None, tables=move(tables), chunks=chunks, ahead=ahead)


def _keys(batch: ForwardInput, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([S + 1] where the keys of each segment begin, [K] where each key lies in the cache). `ends`: keys of each segment."""
    starts = np.concatenate([[0], np.cumsum(ends)])
    owner = np.repeat(np.arange(len(ends)), ends)
    place = np.arange(starts[-1]) - starts[owner]
    return starts, batch.tables[owner, place // BLOCK].astype(np.int64) * BLOCK + place % BLOCK


def _read_in_place(batch: ForwardInput, cache: PagedCache, positions: np.ndarray, where: np.ndarray) -> Pass:
    sizes, geometry = np.diff(batch.starts), cache.geometry
    queries = tile_queries(geometry.heads // geometry.kv_heads)
    singles, chunks = places(sizes, queries)
    ints = [array.astype(np.int32) for array in (batch.starts, batch.context + sizes, batch.tables)]
    at, to, starts, lengths, tables, single, longer = uploaded_together(
        (positions, where, *ints, singles, chunks), cache.device
    )
    split = splits(len(singles), geometry.kv_heads, processors(cache.device))
    tiles = [Tiles(single, 1, split, len(singles) == len(sizes))] if len(singles) else []
    tiles += [Tiles(longer, queries, 1, not len(singles))] if len(chunks) else []
    return Pass(cache=cache, positions=at, where=to, paged=Pages(starts, lengths, tables, tiles))


def _visible(
    keys: torch.Tensor, queries: torch.Tensor, window: int | None, ahead: torch.Tensor | None = None
) -> torch.Tensor:
    seen = keys <= (queries if ahead is None else queries + ahead)
    return seen if window is None else seen & (keys > queries - window)


def _written_out(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, *, scale: float, softmax: Softmax
) -> torch.Tensor:
    """q [B, n, Hq, D], keys and values [B, T, Hkv, D], seen [B, n, T] -> [B, n, Hq, D], with scores in float32, of `QUERIES` queries at a time."""
    group = q.shape[2] // keys.shape[2]
    k, v = (_wide(part).repeat_interleave(group, 1) for part in (keys, values))
    parts = [
        weights_of(some.transpose(1, 2).float() @ k.mT * scale, visible[:, None], softmax) @ v
        for some, visible in zip(q.split(QUERIES, 1), seen.split(QUERIES, 1), strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2).to(q.dtype)


def _step_by_step(
    cache: PagedCache,
    layer: int,
    *,
    q: torch.Tensor,
    blocks: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softmax: Softmax,
) -> torch.Tensor:
    """q [n, Hkv, g, D] -> [n, Hkv, g, D] float32, with a running softmax (Milakov and Gimelshein, arXiv:1805.02867) over
    steps of a few blocks in order. Every product has the same shape whatever the context, and what is masked changes no
    bit."""
    q = q.float() * scale
    best = torch.full((*q.shape[:3], 1), -torch.inf, device=q.device)
    total, out = torch.zeros_like(best), torch.zeros_like(q)
    if softmax.sinks is not None:
        best, total = softmax.sinks.float().view(1, *q.shape[1:3], 1).expand_as(best), torch.ones_like(best)
    masks = mask.split(EXACT_BLOCKS * BLOCK, dim=1)
    for some, masked in zip(blocks.split(EXACT_BLOCKS, dim=1), masks, strict=True):
        keys, values = (_wide(part) for part in cache.gather(layer, some))
        scores = q @ keys.mT
        if softmax.cap is not None:
            scores = scores.div_(softmax.cap).tanh_().mul_(softmax.cap)
        scores = scores.add_(masked[:, None, None])
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, keep = scores.sub_(higher).exp_(), torch.exp(best - higher)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + weights @ values
        best = higher
    return out / total


def _wide(cached: torch.Tensor) -> torch.Tensor:
    """[n, T, Hkv, D] -> [n, Hkv, T, D] float32"""
    return cached.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
