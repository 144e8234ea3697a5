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


class UnsupportedModel(ValueError):
    """The model's attention needs something that trees do not offer."""


@dataclass
class Block:
    """One attention call: a root segment, or a segment with its root, or a whole tree at once."""

    queries: slice
    keys: tuple[slice, ...]
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

    blocks: list[Block]
    windows: list[int | None] = field(default_factory=list)
    """The sliding window that each attention call asked for, in order."""


def tree_of(segments: Sequence[Segment], device: torch.device) -> Tree:
    """The attention calls for the segments of a pack."""
    roots = [i for i, segment in enumerate(segments) if segment.parent == ROOT]
    families = [segments[start:end] for start, end in pairwise([*roots, len(segments)])]
    return Tree([block for family in families for block in _blocks(family, device)])


def _blocks(family: Sequence[Segment], device: torch.device) -> list[Block]:
    root, *children = family
    places = [torch.stack([torch.zeros(root.length, dtype=torch.long), torch.arange(root.length)])]
    for number, child in enumerate(children, 1):
        positions = torch.arange(root.length, root.length + child.length)
        places.append(torch.stack([torch.full_like(positions, number), positions]))
    places = [place.to(device) for place in places]
    if children and _whole_is_cheaper(root, children):
        whole, place = slice(root.start, children[-1].end), torch.cat(places, 1)
        return [Block(whole, (whole,), place, place)]
    above = slice(root.start, root.end)
    blocks = [Block(above, (above,), places[0], places[0])]
    for child, place in zip(children, places[1:], strict=True):
        own = slice(child.start, child.end)
        blocks.append(Block(own, (above, own), place, torch.cat([places[0], place], 1)))
    return blocks


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
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary embeddings leave float32
    outputs = [_attend(block, query, key, value, scaling, sliding_window) for block in tree.blocks]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _attend(block: Block, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
    mask = block.mask(window)
    return scaled_dot_product_attention(
        q[:, :, block.queries],
        _gather(k, block.keys),
        _gather(v, block.keys),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _gather(x: Tensor, ranges: tuple[slice, ...]) -> Tensor:
    return x[:, :, ranges[0]] if len(ranges) == 1 else torch.cat([x[:, :, each] for each in ranges], 2)


def register() -> None:
    """Make `set_attn_implementation(NAME)` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
