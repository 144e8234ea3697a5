"""The caches of several sequences as one, whose rows go on together by a token at a time.

    row 0   .  .  .  a  b  c │ d        Rows end in the same column, and so do windows. A shorter row is padded at its left, where an attention
    row 1   e  f  g  h  i  j │ k        mask hides it, as in a batch of `generate`.

What a recurrent layer keeps has one size whatever the length, and is stacked. A cache is joined when the sequences that run together change,
and otherwise goes on from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_KNOWN = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)
"""Layers of a cache whose tensors `_held` knows, all of them."""


@dataclass(frozen=True)
class _Held:
    """A tensor of a layer, and what its dimensions are."""

    place: dict[Any, Any]
    key: Any
    rows: int
    """The dimension of sequences."""
    columns: int | None
    """The dimension of tokens; None for a state of fixed size."""

    @property
    def tensor(self) -> torch.Tensor:
        return self.place[self.key]


def _held(layer: Any) -> Iterator[_Held]:
    """The tensors of a layer, in an order that is the same for every layer of its kind."""
    place = vars(layer)
    for name, rows, columns in (("keys", 0, -2), ("values", 0, -2), ("indexer_keys", 0, -2), ("indexer_position_ids", 1, -1)):  # fmt: skip
        if place.get(name) is not None:
            yield _Held(place, name, rows, columns)
    for states in (place.get("conv_states"), place.get("recurrent_states")):
        for key, tensor in (states or {}).items():
            if tensor is not None:
                yield _Held(states, key, 0, None)


def objection(cache: Cache) -> str:
    """Returns why caches like this one cannot be joined, half a sentence; empty if they can."""
    strange = [type(layer).__name__ for layer in cache.layers if type(layer) not in _KNOWN]
    return f"its cache has layers of a kind of their own ({strange[0]})" if strange else ""


def sizes_of(cache: Cache) -> tuple[int, int]:
    """(bytes of states of fixed size, bytes of what grows with the tokens), all rows together."""
    held = [held for layer in cache.layers for held in _held(layer)]
    fixed = sum(one.tensor.nbytes for one in held if one.columns is None)
    return fixed, sum(one.tensor.nbytes for one in held) - fixed


def joined(parts: Sequence[tuple[Cache, Sequence[int]]], tokens: int) -> Cache:
    """Returns a cache with these rows of other caches, in this order, of which it shares no memory. `tokens`: those of the longest row."""
    cache = copy(parts[0][0])
    rows = [list(rows) for _, rows in parts]
    layers = zip(*(part.layers for part, _ in parts), strict=True)
    cache.layers = [_joined_layer(same, rows, tokens) for same in layers]
    return cache


def _joined_layer(layers: Sequence[Any], rows: Sequence[list[int]], tokens: int) -> Any:
    layer = copy(layers[0])
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(layer, name, dict(value))
    window = getattr(layer, "sliding_window", None)
    columns = tokens if window is None else min(tokens, window - 1)
    for into, *parts in zip(_held(layer), *map(_held, layers), strict=True):
        pieces = [_rows_of(one, some) for one, some in zip(parts, rows, strict=True)]
        if into.columns is None:
            into.place[into.key] = torch.cat(pieces, into.rows)
        else:
            into.place[into.key] = _aligned(pieces, into, columns)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = tokens
    return layer


def _rows_of(held: _Held, rows: list[int]) -> torch.Tensor:
    tensor = held.tensor
    if rows == list(range(tensor.shape[held.rows])):
        return tensor
    return tensor.index_select(held.rows, torch.tensor(rows, device=tensor.device))


def _aligned(pieces: Sequence[torch.Tensor], like: _Held, columns: int) -> torch.Tensor:
    """All rows, `columns` wide: they end in the last column, and zeros are before a shorter one."""
    assert like.columns is not None
    shape = list(pieces[0].shape)
    shape[like.rows], shape[like.columns] = sum(piece.shape[like.rows] for piece in pieces), columns
    whole, row = pieces[0].new_zeros(shape), 0
    for piece in pieces:
        count, wide = piece.shape[like.rows], min(piece.shape[like.columns], columns)
        into = whole.narrow(like.rows, row, count).narrow(like.columns, columns - wide, wide)
        into.copy_(piece.narrow(like.columns, piece.shape[like.columns] - wide, wide))
        row += count
    return whole
