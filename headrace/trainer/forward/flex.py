"""A pack's attention as one call of FlexAttention (arXiv 2412.05496): on CUDA, where layers are compiled.

A block mask says which blocks of 128 queries and 128 keys see each other wholly, in part or not at all; it is made from the tree's columns, a few
numbers a block, and never from a mask [N, N]. Unlike the varlen kernel it copies no keys for descendants, and its gradients are sums in one
order, where the gradient of such a copy adds in any order on CUDA (C8).

The kernel is tried before it is used, with gradients. On a CPU FlexAttention has no gradient, so there the mask alone is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
NEAR = 0.05
"""Largest error of the trial, of the norm: rounding to bfloat16 makes 0.005, a window that is off by one 0.08."""

Flex = Callable[[Tensor, Tensor, Tensor, BlockMask, float | None], Tensor]
"""query [1, H, N, D], key and value [1, H_kv, N, D], mask, scale -> [1, H, N, D]"""


def block_mask(columns: Tensor, window: int | None, device: torch.device) -> BlockMask:
    """The mask of a tree. `columns` [4, N] on the CPU: place, where the subtree ends to whose root segment the token belongs, position, the last place
    that it sees (as `Block.seen`); `window`: positions that a query sees, its own included; None or 0: all before it."""
    place, end, position, sees = columns
    count = len(place)
    lowest = position - window if window else torch.full_like(position, -1)  # of the positions that are too far back
    on_device = [column.to(device, torch.int32) for column in (end, position, lowest, sees)]
    partly, wholly = _blocks(place, end, position, lowest, sees)
    (some, which), (every, full) = _listed(partly), _listed(wholly)
    named: dict[str, Any] = {"BLOCK_SIZE": BLOCK, "mask_mod": _seen(*on_device), "seq_lengths": (count, count)}
    mask = BlockMask.from_kv_blocks(some, which, every, full, **named)
    found: Any = mask.to(device)
    return found


def _seen(
    end: Tensor, position: Tensor, lowest: Tensor, sees: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Segments lie in preorder: the token at place q sees exactly the places k up to `sees` whose end is behind q."""

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= sees[q]) & (end[k] > q) & (position[k] > lowest[q])

    return mask_mod


def _blocks(place: Tensor, end: Tensor, position: Tensor, lowest: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Twice [B, B] bool: which blocks of queries may see some of a block of keys, and which see all of it."""
    first, last = _bounds(place)
    soonest, latest = _bounds(end)
    nearest, farthest = _bounds(position)
    low, high = _bounds(lowest)
    least, most = _bounds(sees)
    some = (first <= most[:, None]) & (latest > first[:, None]) & (farthest > low[:, None])
    every = (last <= least[:, None]) & (soonest > last[:, None]) & (nearest > high[:, None])
    if len(place) % BLOCK:  # the last block is not full
        every[-1], every[:, -1] = False, False
    return some & ~every, every


def _bounds(column: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each block."""
    parts = column.split(BLOCK)
    return torch.stack([part.min() for part in parts]), torch.stack([part.max() for part in parts])


def _listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, B] how many blocks of keys each block of queries has, [1, 1, B, B] which, and then the rest."""
    order = pairs.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return pairs.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def flex_calls(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    assert isinstance(out, Tensor)
    return out


@cache
def flex_kernel(device: torch.device, dtype: torch.dtype, width: int) -> Flex | None:
    """Returns the compiled kernel if there is one for this device and head width, and if its numbers are right; else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    kernel: Flex = torch.compile(flex_calls, dynamic=True)
    try:
        return kernel if is_right(kernel, device, dtype, width) else None
    except Exception:  # Triton, inductor and older devices raise their own kinds
        return None


def is_right(kernel: Flex, device: torch.device, dtype: torch.dtype, width: int = 64) -> bool:
    """Whether output and gradients are those of masked attention in float32, on a tree of several blocks, with and without a window."""
    generator = torch.Generator().manual_seed(0)
    columns = _trial_columns()
    count = columns.shape[1]
    shapes = ((1, 4, count, width), (1, 2, count, width), (1, 2, count, width))
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    slope = torch.randn(shapes[0], generator=generator).to(device)
    for window in (None, 70):
        mask = block_mask(columns, window, device)
        found = _with_gradients(lambda q, k, v, mask=mask: kernel(q, k, v, mask, None), given, slope)
        dense = _dense(columns, window).to(device)
        expected = _with_gradients(
            lambda q, k, v, dense=dense: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=dense, enable_gqa=True
            ),
            [x.float() for x in given],
            slope,
        )
        for actual, wanted in zip(found, expected, strict=True):
            if not (actual.float() - wanted).norm() <= NEAR * wanted.norm():
                return False
    return True


def _trial_columns() -> Tensor:
    """A prompt of 150 tokens with two completions, of which the first forks, and another sequence: 430 tokens."""
    segments = ((0, 150, 0, 390), (150, 60, 150, 280), (210, 40, 210, 250), (250, 30, 210, 280), (280, 110, 150, 390))
    columns = [
        (start + i, end, above + i)
        for start, length, above, end in (*segments, (390, 40, 0, 430))
        for i in range(length)
    ]
    place, end, position = torch.tensor(columns).t()
    return torch.stack([place, end, position, place])


def _dense(columns: Tensor, window: int | None) -> Tensor:
    """[N, N] bool"""
    place, end, position, sees = columns
    seen = (place <= sees[:, None]) & (end > place[:, None])
    return seen & (position[:, None] - position < window) if window else seen


def _with_gradients(function: Callable[..., Tensor], given: list[Tensor], slope: Tensor) -> list[Tensor]:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(slope.device.type, enabled=False):
        inputs = [x.clone().requires_grad_() for x in given]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad((out.float() * slope).sum(), inputs)]
