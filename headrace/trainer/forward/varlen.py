"""A pack's attention as one call of a varlen kernel: for CUDA, where many small calls and large masks are slow.

Every segment is a sequence of its own: its keys are those of its ancestors, followed by its own. Kernels that align the causal triangle
at the lower right (FlashAttention's, which torch offers as `torch.nn.attention.varlen`) then need no mask. Key i of a
segment has position i, so windows are right too. Keys and values of ancestors are copied for each descendant, which costs little beside
the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.packing import ROOT, Segment


class Kernel(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Varlen, /, *, scale: float | None, reach: int
    ) -> Tensor:
        """query [Q, H, D], key and value [K, H_kv, D] -> [Q, H, D]. `reach`: keys that a query sees; 0: all before it."""
        ...


@dataclass
class Varlen:
    """The layout of one call."""

    source: Tensor
    """[K] int64: the place in the pack of every key."""
    query_starts: Tensor
    """[segments + 1] int32"""
    key_starts: Tensor
    """[segments + 1] int32"""
    longest_query: int
    longest_key: int

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
    longest = max(segment.length for segment in segments)
    return Varlen(source.to(device), query_starts, key_starts, longest, max(lengths))


@cache
def varlen_kernel(device: torch.device, dtype: torch.dtype, width: int) -> Kernel | None:
    """Returns torch's kernel if there is one for this device and head width, and if its numbers are right; else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        return _flash if is_right(_flash, device, dtype, width) else None
    except (ImportError, TypeError, RuntimeError):  # an older torch, or an older device
        return None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Varlen, *, scale: float | None, reach: int
) -> Tensor:  # pragma: no cover - needs CUDA
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        layout.query_starts,
        layout.key_starts,
        layout.longest_query,
        layout.longest_key,
        scale=scale,
        window_size=(reach - 1 if reach else -1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def is_right(kernel: Kernel, device: torch.device, dtype: torch.dtype, width: int = 64) -> bool:
    """Whether output and gradients are those of masked attention in float32, on a small tree, with and without a window."""
    segments = (Segment(0, 19), Segment(19, 7, 0), Segment(26, 5, 1), Segment(31, 11, 0))
    chains = ((0,), (0, 1), (0, 1, 2), (0, 3))
    layout = varlen_of(segments, device)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 42, width), (1, 2, 42, width), (1, 2, 42, width))
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    slope = torch.randn(1, 42, 4, width, generator=generator).to(device)
    for reach in (0, 4):
        actual = _with_gradients(
            lambda q, k, v, reach=reach: layout.attend(kernel, q, k, v, scaling=None, window=reach), given, slope
        )
        masked = [x.float() for x in given]
        expected = _with_gradients(
            lambda q, k, v, reach=reach: _segment_by_segment(segments, chains, q=q, k=k, v=v, reach=reach),
            masked,
            slope,
        )
        for one, other in zip(actual, expected, strict=True):
            if not (one.float() - other).abs().max() <= 0.1 * other.square().mean().sqrt():
                return False
    return True


def _with_gradients(function: Callable[..., Tensor], given: Sequence[Tensor], slope: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        inputs = [x.clone().requires_grad_() for x in given]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad((out.float() * slope).sum(), inputs)]


def _segment_by_segment(
    segments: Sequence[Segment], chains: Sequence[Sequence[int]], *, q: Tensor, k: Tensor, v: Tensor, reach: int
) -> Tensor:
    outputs = []
    for segment, chain in zip(segments, chains, strict=True):
        keys = torch.cat([torch.arange(segments[i].start, segments[i].end) for i in chain])
        count = len(keys)
        distance = torch.arange(count - segment.length, count)[:, None] - torch.arange(count)
        seen = (distance >= 0) & (distance < (reach or count))
        outputs.append(
            scaled_dot_product_attention(
                q[:, :, segment.start : segment.end],
                k[:, :, keys],
                v[:, :, keys],
                attn_mask=seen.to(q.device),
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2)
