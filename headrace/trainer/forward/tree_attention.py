"""Attention over packed trees, plugged into Hugging Face models through transformers' AttentionInterface.

transformers builds no mask for an attention function whose name it does not know, and hands that function the keyword
arguments of the model's forward: the tree travels as `tree=`.

On CUDA in half precision one call serves the whole pack: of FlexAttention where layers are compiled (`flex.py`), else of a varlen kernel. Elsewhere a tree is cut into calls of
scaled_dot_product_attention: one for each segment with what lies above it, or a single masked one for a whole subtree.

A tree whose tokens lie on several ranks (`context.py`) is attended to by each of them, for its part of the heads or of the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.models.image_blocks import kind_of
from headrace.native.cuda_ops import Kernel, Layout, varlen_kernel
from headrace.trainer.forward.context import Context
from headrace.trainer.forward.flex import block_mask, flex_kernel
from headrace.trainer.packing import ROOT, Segment

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# --- A pack's attention as one call of a varlen kernel (`native/cuda_ops.py`)
# For CUDA, where many small calls and large masks are slow.
#
# Every segment is a sequence of its own: its keys are those of its ancestors, followed by its own. The kernel aligns the causal triangle at
# the lower right, so it needs no mask. Key i of a segment has position i, so windows are right too. Keys and values of ancestors are copied
# for each descendant, which costs little beside the product.


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
    lengths = [sum(segment.length for segment in chain) for chain in chains]
    source = torch.cat([torch.arange(segment.start, segment.end) for chain in chains for segment in chain])
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


# --- tree attention ------------------------------------------------------------


NAME = "headrace_tree"

# The price of a call with q queries and k keys, in pairs of tokens: q·k + ROW_PRICE·(q + k) + CALL_PRICE. Measured on CPU
# (fp32 and bf16, 9/3 heads of 64, forward and backward): 40 to 60 ns a pair, seen or masked alike.
ROW_PRICE, CALL_PRICE = 25, 6_000

CAUSAL_BLOCK = 256
"""Block size of unmasked causal attention: L queries cost about L·(L / 2 + CAUSAL_BLOCK) pairs if that is less than all L²."""

FLOAT32_UP_TO = 256
"""CPU attention with up to this many keys is computed in float32: the bf16 kernel would take up to three times as long."""


MASK_ELEMENTS = 1 << 22
"""Largest number of elements of one mask. Larger calls are split by queries, each part with the keys that its queries can see."""


class UnsupportedModel(ValueError):
    """The model's attention needs something that trees do not offer."""


class Part(NamedTuple):
    """Some queries of a block, and a range of its keys that includes all that these queries see."""

    queries: slice
    keys: slice
    mask: Tensor | None
    """[queries, keys], added to the scores: 0 or -inf. None where plain causal attention is equivalent."""


@dataclass(kw_only=True)
class Block:
    """One attention call: a segment with its ancestors, or a whole subtree with them."""

    queries: int
    """Index of the piece of the pack that holds the queries."""
    keys: tuple[int, ...]
    """Indices of the pieces that they may see, the root first and their own last."""
    seen: Tensor
    """[4, keys] int64: place in the pack; where the subtree ends to whose root segment the key belongs; position in the sequence; the last place
    that it sees as a query, its own or the end of its image. Segments lie in preorder, so a query at place p that sees up to place r sees exactly the
    keys with place <= r and p < end."""
    asking: range
    """Which of the keys are the queries: the last ones, or every n-th of these."""
    alone: bool
    """Whether it is a root segment with all its queries, for which plain causal attention is enough."""
    _parts: dict[tuple[int, torch.dtype, bool], list[Part]] = field(default_factory=dict)

    def parts(self, window: int | None, dtype: torch.dtype, ahead: bool = False) -> list[Part]:
        """The parts of the call, cached: every layer needs them, and autograd keeps them alive anyway. `ahead`: whether images see ahead."""
        asked = window or 0, dtype, ahead
        if asked not in self._parts:
            self._parts[asked] = self._make_parts(*asked)
        return self._parts[asked]

    def _make_parts(self, reach: int, dtype: torch.dtype, ahead: bool) -> list[Part]:
        count, total = len(self.asking), self.seen.shape[1]
        causal = not ahead or bool((self.seen[3] == self.seen[0]).all())
        if self.alone and causal and not 0 < reach < total:
            return [Part(slice(0, count), slice(0, total), None)]
        size = max(MASK_ELEMENTS // total, 128)
        starts = range(0, count, size)
        return [self._part(slice(start, min(start + size, count)), reach, dtype, ahead) for start in starts]

    def _part(self, queries: slice, reach: int, dtype: torch.dtype, ahead: bool) -> Part:
        asking = self.asking[queries]
        mine = self.seen[:, asking.start : asking.stop : asking.step]
        sees = mine[3 if ahead else 0]
        place, end, position, _ = self.seen
        candidates = (place <= sees.max()) & (end > mine[0].min())
        if reach:
            candidates &= position > mine[2].min() - reach
        first, last = candidates.nonzero()[[0, -1], 0].tolist()
        keys = slice(first, last + 1)
        place, end, position, _ = self.seen[:, keys]
        hidden = (place > sees[:, None]) | (end <= mine[0][:, None])
        if reach:
            hidden |= mine[2][:, None] - position >= reach
        return Part(queries, keys, torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf))


@dataclass(frozen=True)
class ImagesAhead:
    """Tokens of images that see later ones."""

    counts: Tensor
    """[N] int64 on the CPU: how many of the tokens behind it each token sees. They lie in its segment."""
    kinds: frozenset[str]
    """The kinds of layers in which they do (`models/image_blocks.py`)."""


@dataclass(kw_only=True)
class Tree:
    """The attention pattern of a pack: which tokens attend to which."""

    segments: tuple[Segment, ...]
    pieces: list[int]
    """Lengths of the pieces. The pack is split into them once, which costs less in the backward pass than a slice for every call."""
    blocks: list[Block]
    """The calls, one for each piece, in order."""
    context: Context | None = None
    """The ranks that the tokens are spread over; None: all are here."""
    flex: bool = False
    """Whether FlexAttention may compute it (`flex.py`): where layers are compiled."""
    ahead: ImagesAhead | None = None
    """None where every token sees back alone."""
    windows: list[int | None] = field(default_factory=list)
    """The sliding window that each attention call asked for, in order."""
    _masks: dict[tuple[int, bool], BlockMask] = field(default_factory=dict)
    _varlen: Varlen | None = None
    _own: list[Block] | None = None

    def varlen(self, device: torch.device) -> Varlen:
        self._varlen = self._varlen or varlen_of(self.segments, device)
        return self._varlen

    def sees_ahead(self, window: int | None) -> bool:
        """Whether images do in a layer with this window."""
        return self.ahead is not None and kind_of(window) in self.ahead.kinds

    def mask(self, window: int | None, device: torch.device) -> BlockMask:
        asked = window or 0, self.sees_ahead(window)
        if asked not in self._masks:
            ends = _subtree_ends(self.segments)
            ahead = self.ahead if asked[1] else None
            columns = _columns(self.segments, _tokens_above(self.segments), ends, ahead)
            self._masks[asked] = block_mask(columns, window, device)
        return self._masks[asked]

    def own_blocks(self, context: Context) -> list[Block]:
        """The calls for the queries of this rank, with all their keys. `Block.queries` counts these calls."""
        if self._own is None:
            self._own, start = [], 0
            for block, length in zip(self.blocks, self.pieces, strict=True):
                asking = block.asking[(context.rank - start) % context.size :: context.size]
                if asking:
                    self._own.append(replace(block, queries=len(self._own), asking=asking, alone=False, _parts={}))
                start += length
        return self._own


def tree_of(
    segments: Sequence[Segment],
    device: torch.device,
    call_price: int = CALL_PRICE,
    *,
    context: Context | None = None,
    flex: bool = False,
    ahead: ImagesAhead | None = None,
) -> Tree:
    """The attention calls for the segments of a pack, which are in preorder. A higher `call_price` means fewer calls. Raises ValueError for an image
    that lies in several segments."""
    above, ends = _tokens_above(segments), _subtree_ends(segments)
    whole = _whole_is_cheaper(segments, above, ends, call_price)
    tree = Tree(segments=tuple(segments), pieces=[], blocks=[], context=context, flex=flex, ahead=ahead)
    columns = _columns(segments, above, ends, ahead)
    piece_of: dict[int, int] = {}
    i = 0
    while i < len(segments):
        segment, piece, chain = segments[i], len(tree.pieces), _ancestors(segments, i)
        piece_of[i] = piece
        own = slice(segment.start, segments[ends[i] - 1].end if whole[i] else segment.end)
        seen = columns[:, own]
        if chain:
            spans = [slice(segments[j].start, segments[j].end) for j in chain]
            seen = torch.cat([*(columns[:, span] for span in spans), seen], 1)
        keys = (*(piece_of[j] for j in chain), piece)
        alone, length, total = segment.parent == ROOT and own.stop == segment.end, own.stop - own.start, seen.shape[1]
        asking = range(total - length, total)
        tree.blocks.append(Block(queries=piece, keys=keys, seen=seen.to(device), asking=asking, alone=alone))
        tree.pieces.append(length)
        i = ends[i] if whole[i] else i + 1
    return tree


def _tokens_above(segments: Sequence[Segment]) -> list[int]:
    """The tokens of all ancestors of each segment."""
    above = [0] * len(segments)
    for i, segment in enumerate(segments):
        if segment.parent != ROOT:
            above[i] = above[segment.parent] + segments[segment.parent].length
    return above


def _columns(
    segments: Sequence[Segment], above: Sequence[int], ends: Sequence[int], ahead: ImagesAhead | None = None
) -> Tensor:
    """[4, N]: `Block.seen` of every token of the pack."""
    columns = torch.arange(segments[-1].end).repeat(4, 1)
    if ahead is not None:
        columns[3] += ahead.counts
    for i, segment in enumerate(segments):
        columns[1, segment.start : segment.end] = segments[ends[i] - 1].end
        columns[2, segment.start : segment.end] -= segment.start - above[i]
        if columns[3, segment.start : segment.end].max() >= segment.end:
            raise ValueError("an image whose tokens see each other lies in two segments of a tree")
    return columns


def _ancestors(segments: Sequence[Segment], i: int) -> list[int]:
    """The ancestors of segment i, the root first."""
    chain = []
    while (i := segments[i].parent) != ROOT:
        chain.append(i)
    return chain[::-1]


def _subtree_ends(segments: Sequence[Segment]) -> list[int]:
    """Returns for each segment one more than the index of its last descendant."""
    ends = list(range(1, len(segments) + 1))
    for i in reversed(range(len(segments))):
        if (parent := segments[i].parent) != ROOT:
            ends[parent] = max(ends[parent], ends[i])
    return ends


def _whole_is_cheaper(
    segments: Sequence[Segment], above: Sequence[int], ends: Sequence[int], call_price: int
) -> list[bool]:
    """Returns for each segment whether one masked call for its subtree costs less than the cheapest way to split it."""
    whole = [False] * len(segments)
    below = [0] * len(segments)  # the lowest price of all descendants of a segment
    for i in reversed(range(len(segments))):
        segment = segments[i]
        size = segments[ends[i] - 1].end - segment.start
        split = _own_price(segment.length, above[i]) + call_price + below[i]
        together = _price(size, above[i] + size) + call_price
        whole[i] = together <= split
        if segment.parent != ROOT:
            below[segment.parent] += min(together, split)
    return whole


def _own_price(length: int, above: int) -> int:
    """The price of a segment's own call. Without ancestors it needs no mask, and the kernel skips the unseen half of a long segment."""
    skipped = 0 if above else max(length * (length // 2 - CAUSAL_BLOCK), 0)
    return _price(length, above + length) - skipped


def _price(queries: int, keys: int) -> int:
    return queries * keys + ROW_PRICE * (queries + keys)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> ([1, N, H, D], None). Dropout is ignored: RL has none.

    N are the tokens of this rank where they are spread over several.
    """
    if tree is None or attention_mask is not None or query.shape[0] != 1:
        raise UnsupportedModel("the model does not pass the tree to its attention")
    foreign = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if foreign:
        raise UnsupportedModel(f"the model's attention uses {', '.join(foreign)}")
    tree.windows.append(sliding_window)
    context = tree.context
    if context is None:
        return _whole(tree, query, key, value, scaling=scaling, window=sliding_window), None
    if context.divides(query.shape[1]):
        query, key, value = context.to_heads(query, key, value)
        return context.to_tokens(_whole(tree, query, key, value, scaling=scaling, window=sliding_window)), None
    key, value = context.gathered(key, value)
    blocks = tree.own_blocks(context)
    return _by_blocks(tree, blocks, query, key, value, scaling=scaling, window=sliding_window), None


def _whole(
    tree: Tree, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
) -> Tensor:
    ahead = tree.sees_ahead(window)
    if tree.flex and (flex := flex_kernel(query.device, value.dtype, value.shape[3])):
        q, k = query.to(value.dtype), key.to(value.dtype)  # under autocast, rotary embeddings leave them in float32
        with torch.autocast(query.device.type, enabled=False):
            return flex(q, k, value, tree.mask(window, query.device), scaling).transpose(1, 2).contiguous()
    if not ahead and (kernel := varlen_kernel(query.device, value.dtype, value.shape[3])):
        return tree.varlen(query.device).attend(kernel, query, key, value, scaling=scaling, window=window)
    return _by_blocks(tree, tree.blocks, query, key, value, scaling=scaling, window=window)


def _by_blocks(
    tree: Tree,
    blocks: Sequence[Block],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    queries = query.split([len(block.asking) for block in blocks], 2)
    keys, values = (x.split(tree.pieces, 2) for x in (key, value))
    outputs = [
        _attend(
            block,
            queries[block.queries],
            k=_join([keys[i] for i in block.keys]),
            v=_join([values[i] for i in block.keys]),
            scaling=scaling,
            window=window,
            ahead=tree.sees_ahead(window),
        )
        for block in blocks
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _attend(
    block: Block, q: Tensor, *, k: Tensor, v: Tensor, scaling: float | None, window: int | None, ahead: bool
) -> Tensor:
    small = q.device.type == "cpu" and k.shape[2] <= FLOAT32_UP_TO
    # under autocast, rotary embeddings leave q and k in float32 and v in bf16
    dtype = torch.promote_types(v.dtype, torch.float32) if small else v.dtype
    lowered, outputs = [x.to(dtype) for x in (q, k, v)], []
    with torch.autocast(q.device.type, enabled=False):
        for part in block.parts(window, dtype, ahead):
            places = (part.queries, part.keys, part.keys)
            mine, keys, values = (_cut(x, place) for x, place in zip(lowered, places, strict=True))
            outputs.append(
                scaled_dot_product_attention(
                    mine,
                    keys,
                    values,
                    attn_mask=part.mask,
                    is_causal=part.mask is None,
                    scale=scaling,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            )
    return _join(outputs).to(v.dtype)


def _cut(x: Tensor, place: slice) -> Tensor:
    """Slices x, unless the slice is all of x: its backward pass would still cost a copy."""
    return x if place.stop - place.start == x.shape[2] else x[:, :, place]


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 2)


def register() -> None:
    """Makes `set_attn_implementation(NAME)` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
