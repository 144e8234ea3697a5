"""Attention over packed trees, plugged into Hugging Face models through transformers' AttentionInterface.

transformers builds no mask for an attention function whose name it does not know, and hands that function the keyword
arguments of the model's forward: the tree travels as `tree=`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.packing import ROOT, Segment

NAME = "headrace_tree"

# Measured on CPU (bf16 and fp32, 9/3 heads, forward and backward): one masked call for a tree costs its length squared; one
# call per segment 1.5 times the pairs that see each other, plus an overhead worth about 10,000 pairs a call.
SEGMENT_PRICE, SEGMENT_OVERHEAD = 1.5, 10_000

FLOAT32_UP_TO = 256
"""Keys of a call up to which CPU attention is done in float32: there the bf16 kernel takes up to twice as long."""


class UnsupportedModel(ValueError):
    """The model's attention needs something that trees do not offer."""


@dataclass
class Block:
    """One attention call: a root segment, or a segment with its root, or a whole tree at once."""

    queries: int
    """Number of the piece of the pack that asks."""
    keys: tuple[int, ...]
    """Numbers of the pieces that it may see."""
    query_place: Tensor
    """[2, queries] int64: number of the segment (0 is the root), position in the sequence."""
    key_place: Tensor
    """[2, keys]"""
    _masks: dict[int, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[queries, keys] bool, True where a query sees a key; None where plain causal attention says the same."""
        reach = window or 0
        if reach not in self._masks:
            self._masks[reach] = self._make_mask(reach)
        return self._masks[reach]

    def _make_mask(self, reach: int) -> Tensor | None:
        if self.keys == (self.queries,) and not self.key_place[0].any() and not 0 < reach < self.key_place.shape[1]:
            return None
        (q_segment, q_position), (k_segment, k_position) = self.query_place, self.key_place
        distance = q_position[:, None] - k_position[None, :]
        related = (q_segment[:, None] == k_segment[None, :]) | (k_segment == 0)[None, :]
        seen = related & (distance >= 0)
        return seen & (distance < reach) if reach else seen


@dataclass
class Tree:
    """Who sees whom in a pack."""

    pieces: list[int]
    """Lengths: the pack is cut into these, once, which costs less in the backward pass than slicing it for every call."""
    blocks: list[Block]
    """One for each piece, in order."""
    windows: list[int | None] = field(default_factory=list)
    """The sliding window that each attention call asked for, in order."""


def tree_of(segments: Sequence[Segment], device: torch.device) -> Tree:
    """The attention calls for the segments of a pack."""
    roots = [i for i, segment in enumerate(segments) if segment.parent == ROOT]
    tree = Tree([], [])
    for start, end in pairwise([*roots, len(segments)]):
        _add_family(tree, segments[start], segments[start + 1 : end], device)
    return tree


def _add_family(tree: Tree, root: Segment, children: Sequence[Segment], device: torch.device) -> None:
    places = [torch.stack([torch.zeros(root.length, dtype=torch.long), torch.arange(root.length)])]
    for number, child in enumerate(children, 1):
        positions = torch.arange(root.length, root.length + child.length)
        places.append(torch.stack([torch.full_like(positions, number), positions]))
    if children and _whole_is_cheaper(root, children):
        places = [torch.cat(places, 1)]
    first = len(tree.pieces)
    for piece, place in enumerate(places, first):
        keys: tuple[int, ...] = (piece,)
        key_place = place
        if piece > first:
            keys, key_place = (first, piece), torch.cat([places[0], place], 1)
        tree.pieces.append(place.shape[1])
        tree.blocks.append(Block(piece, keys, place.to(device), key_place.to(device)))


def _whole_is_cheaper(root: Segment, children: Sequence[Segment]) -> bool:
    length = children[-1].end - root.start
    pairs = root.length**2 + sum(child.length * (root.length + child.length) for child in children)
    return length**2 <= SEGMENT_PRICE * pairs + SEGMENT_OVERHEAD * (1 + len(children))


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> ([1, N, H, D], None). Dropout is ignored: RL has none."""
    if tree is None or attention_mask is not None or query.shape[0] != 1:
        raise UnsupportedModel("the model does not hand the tree to its attention")
    foreign = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if foreign:
        raise UnsupportedModel(f"the model's attention uses {', '.join(foreign)}")
    tree.windows.append(sliding_window)
    queries, keys, values = (x.split(tree.pieces, 2) for x in (query, key, value))
    outputs = [
        _attend(
            block,
            queries[block.queries],
            _join([keys[i] for i in block.keys]),
            _join([values[i] for i in block.keys]),
            scaling,
            sliding_window,
        )
        for block in tree.blocks
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _attend(block: Block, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    mask = block.mask(window)
    small = q.device.type == "cpu" and k.shape[2] <= FLOAT32_UP_TO
    dtype = (
        torch.float32 if small else v.dtype
    )  # under autocast, rotary embeddings leave q and k in float32 and v in bf16
    with torch.autocast(q.device.type, enabled=False):
        out = scaled_dot_product_attention(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out.to(v.dtype)


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 2)


def register() -> None:
    """Make `set_attn_implementation(NAME)` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
