"""Attention of one flat forward pass over a ragged batch, the same for both runners.

    tokens = [ one token for each of B running sequences | chunk of prompt | chunk of prompt | ... ]      N in all

Running sequences sit in cache rows [0, B), so their attention is one call over a slice of the cache with a mask by length;
each chunk is one causal call over its own row. Grouped-query attention is left to torch, whose kernels repeat nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.engine.native.kv import KVCache


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a prompt that is computed in cache row `row`."""

    row: int
    start: int
    stop: int


@dataclass
class Ragged:
    """What attention must know of one forward pass. Masks are made once and used by every layer."""

    cache: KVCache
    lengths: np.ndarray
    """[B] tokens in the cache of each running sequence, before this pass."""
    chunks: list[Chunk]
    device: torch.device
    dtype: torch.dtype
    positions: torch.Tensor = field(init=False)
    """[N]"""
    where: torch.Tensor = field(init=False)
    """[N] row * Tmax + position: where each token's key and value go."""
    _decode_masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _chunk_masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spans = [np.arange(chunk.start, chunk.stop) for chunk in self.chunks]
        positions = np.concatenate([self.lengths, *spans]).astype(np.int64)
        rows = [np.full(chunk.stop - chunk.start, chunk.row) for chunk in self.chunks]
        where = np.concatenate([np.arange(len(self.lengths)), *rows]).astype(np.int64) * self.cache.tokens + positions
        self.positions = torch.from_numpy(positions).to(self.device)
        self.where = torch.from_numpy(where).to(self.device)
        self.longest = int(self.lengths.max()) + 1 if len(self.lengths) else 0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]. Writes k and v into the cache first.

        `window`: a token sees itself and the window - 1 tokens before it.
        """
        self.cache.write(layer, self.where, k, v)
        running = len(self.lengths)
        if not self.chunks:
            return self._decode(layer, q, scale, window)
        parts = [self._decode(layer, q[:running], scale, window)] if running else []
        offset = running
        for index, chunk in enumerate(self.chunks):
            size = chunk.stop - chunk.start
            parts.append(self._prefill(layer, index, q[offset : offset + size], scale, window))
            offset += size
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _decode(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        rows = len(q)
        keys, values = self.cache.layer(layer)
        out = scaled_dot_product_attention(
            q[:, :, None],
            keys[:rows, : self.longest].transpose(1, 2),
            values[:rows, : self.longest].transpose(1, 2),
            attn_mask=self._decode_mask(window),
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[2],
        )
        return out[:, :, 0]

    def _prefill(self, layer: int, index: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        chunk = self.chunks[index]
        keys, values = self.cache.layer(layer)
        mask = self._chunk_mask(index, window)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[chunk.row, : chunk.stop].transpose(0, 1)[None],
            values[chunk.row, : chunk.stop].transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[2],
        )
        return out[0].transpose(0, 1)

    def _decode_mask(self, window: int | None) -> torch.Tensor:
        """[B, 1, 1, longest], added to the scores."""
        if window not in self._decode_masks:
            last = self.positions[: len(self.lengths), None]
            seen = _visible(torch.arange(self.longest, device=self.device)[None], last, window)
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
            self._decode_masks[window] = mask[:, None, None]
        return self._decode_masks[window]

    def _chunk_mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """[chunk, stop] of booleans; None where plain causality says it all."""
        key = (index, window)
        if key not in self._chunk_masks:
            chunk = self.chunks[index]
            if chunk.start == 0 and (window is None or window >= chunk.stop):
                self._chunk_masks[key] = None
            else:
                queries = torch.arange(chunk.start, chunk.stop, device=self.device)[:, None]
                self._chunk_masks[key] = _visible(torch.arange(chunk.stop, device=self.device)[None], queries, window)
        return self._chunk_masks[key]


def _visible(keys: torch.Tensor, queries: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
