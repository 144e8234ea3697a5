"""The kernel that reads pages, tried on a few segments before it is trusted: compilers and devices differ in what they make of it."""

from __future__ import annotations

import logging
from functools import cache
from itertools import pairwise, product

import numpy as np
import torch

from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.runners.pages import (
    PLAIN,
    PageKernel,
    Pages,
    Softmax,
    Tiles,
    places,
    tile_queries,
    weights_of,
)

log = logging.getLogger(__name__)


@cache
def page_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, plain: bool = True) -> PageKernel | None:
    """Returns the kernel if this device runs it and its numbers are right; else None, and on CUDA the reason why not in the log.
    `plain`: whether scores have neither caps nor sinks. In half precision only: nobody serves float32 on a GPU but to compare, and its products would not use the tensor cores."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from headrace.engine.native.runners.page_kernels import read_pages

        error = deviation(read_pages, device, dtype, head_dim, plain)
        if error <= 0.05:
            return read_pages
        reason = f"its numbers are off by {error:.2g} of their size"
    except Exception as problem:  # what a compiler says of a device that it does not know has no common type
        reason = f"{type(problem).__name__}: {problem}"
    log.warning(
        "the engine's attention kernel is not used on this device (%s); every layer copies the keys and values of all sequences, padded "
        "to the longest one, which multiplies the time of decoding where lengths differ",
        reason,
    )
    return None


_SIZES, _CONTEXT = (1, 19, 1, 1, 30, 2), (0, 40, 33, 200, 7, 64)


def deviation(kernel: PageKernel, device: torch.device, dtype: torch.dtype, head_dim: int, plain: bool = True) -> float:
    """The kernel's largest error on a few segments, with and without a window, split and not, with caps and sinks unless `plain`, as a share of the
    outputs' size."""
    sizes, context = np.array(_SIZES), np.array(_CONTEXT)
    lengths, width = sizes + context, 9
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(sizes) * width, generator=generator).view(len(sizes), width)
    keys, values = (torch.randn(len(sizes) * width, BLOCK, 2, head_dim, generator=generator) for _ in range(2))
    q = torch.randn(int(sizes.sum()), 6, head_dim, generator=generator)
    q, keys, values = (x.to(device, dtype) for x in (q, keys, values))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    worst = 0.0
    sinks = torch.linspace(-1, 2, q.shape[1]).to(device, dtype)
    kinds = (PLAIN,) if plain else (PLAIN, Softmax(cap=1.5), Softmax(sinks=sinks))
    for softmax, (window, split) in product(kinds, ((None, 1), (None, 4), (37, 1), (37, 4))):
        pages = _trial(starts, lengths, order, split=split, device=device)
        found = kernel(q, keys, values, pages, scale=head_dim**-0.5, window=window, softmax=softmax)
        for s, (start, stop) in enumerate(pairwise(starts.tolist())):
            k, v = (x[order[s].to(device)].flatten(0, 1)[: lengths[s]].float() for x in (keys, values))
            mine = _plain(q[start:stop].float(), k, v, scale=head_dim**-0.5, window=window, softmax=softmax)
            error = (found[start:stop].float() - mine).abs().max() / mine.square().mean().sqrt()
            worst = max(worst, float(error)) if bool(error.isfinite()) else float("inf")
    return worst


def _trial(starts: np.ndarray, lengths: np.ndarray, order: torch.Tensor, *, split: int, device: torch.device) -> Pages:
    queries = tile_queries(3)
    single, chunks = (torch.from_numpy(part).to(device) for part in places(np.diff(starts), queries))
    begin, length = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (starts, lengths))
    return Pages(begin, length, order.to(device, torch.int32), (Tiles(single, 1, split), Tiles(chunks, queries)))


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, softmax: Softmax
) -> torch.Tensor:
    """q [n, Hq, D] of the last n of T tokens, k and v [T, Hkv, D] -> [n, Hq, D], all float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    distance = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    hidden = (distance < 0) | (distance >= (window or len(k)))
    scores = torch.einsum("nhd,thd->hnt", q, k) * scale
    return torch.einsum("hnt,thd->nhd", weights_of(scores, ~hidden, softmax), v)
