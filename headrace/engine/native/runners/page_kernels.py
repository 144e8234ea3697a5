"""Attention over pages of keys and values in Triton, which torch's CUDA packages for Linux bring along. Imported where it is used.

A program takes one tile: the queries of one segment that follow each other, times the query heads of one key head, as the rows of its
products, so that keys and values are read once for all of them. It walks over the keys that its queries see, in steps of `STEP`, with a
running softmax (Milakov and Gimelshein, arXiv:1805.02867), and looks every step's pages up in the segment's table. A decoding row has
one query: there the keys are split over several programs (Dao et al., Flash-Decoding, 2023), whose results a second kernel adds up.

Every number that differs between passes is read from memory, so that a captured launch serves later passes too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.native.runners.pages import PLAIN, Pages, Softmax, Tiles

LOG2_E = 1.4426950408889634


def read_pages(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Pages,
    /,
    *,
    scale: float,
    window: int | None,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Protocol `PageKernel`."""
    assert softmax.sinks is None or softmax.sinks.is_contiguous()
    assert keys.is_contiguous() and values.is_contiguous() and q[:1].is_contiguous()
    covered = len(pages.tiles) == 1 and pages.tiles[0].all_tokens
    out = (torch.empty if covered else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    for tiles in pages.tiles:
        if tiles.splits == 1:
            _launch(q, (keys, values), pages, tiles, results=(out, out), scale=scale, window=window, softmax=softmax)
            continue
        shape = (len(tiles.places), tiles.splits, q.shape[1])
        parts = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
        logs = torch.empty(shape, dtype=torch.float32, device=q.device)
        _launch(q, (keys, values), pages, tiles, results=(parts, logs), scale=scale, window=window, softmax=softmax)
        _merge[(len(tiles.places), q.shape[1])](
            parts=parts,
            logs=logs,
            out=out,
            tiles=tiles.places,
            starts=pages.starts,
            sinks=q if softmax.sinks is None else softmax.sinks,
            SUNK=softmax.sinks is not None,
            HEADS=q.shape[1],
            DIM=q.shape[2],
            WIDTH=_width(q.shape[2]),
            SPLITS=tiles.splits,
            SPLITS_WIDE=triton.next_power_of_2(tiles.splits),
        )
    return out


def _launch(
    q: torch.Tensor,
    cached: tuple[torch.Tensor, torch.Tensor],
    pages: Pages,
    tiles: Tiles,
    *,
    results: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    window: int | None,
    softmax: Softmax,
) -> None:
    keys, values = cached
    heads, dim, kv_heads = q.shape[1], q.shape[2], keys.shape[2]
    rows = max(16, triton.next_power_of_2(tiles.queries * (heads // kv_heads)))
    _attend[(len(tiles.places), kv_heads, tiles.splits)](
        q=q,
        keys=keys,
        values=values,
        out=results[0],
        logs=results[1],
        tiles=tiles.places,
        starts=pages.starts,
        lengths=pages.lengths,
        tables=pages.tables,
        sinks=q if softmax.sinks is None else softmax.sinks,
        scale=scale * LOG2_E if softmax.cap is None else 2 * scale / softmax.cap,
        cap=LOG2_E * (softmax.cap or 0.0),
        window=window or 0,
        q_token=q.stride(0),
        table_row=pages.tables.stride(0),
        table_column=pages.tables.stride(1),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        QUERIES=tiles.queries,
        DIM=dim,
        WIDTH=_width(dim),
        ROWS=rows,
        STEP=32 if dim > 128 else 64,
        PAGE=keys.shape[1],
        SPLITS=tiles.splits,
        CAPPED=softmax.cap is not None,
        SUNK=softmax.sinks is not None,
        num_warps=8 if rows * _width(dim) > 64 * 128 else 4,
        num_stages=3 if tiles.queries == 1 else 2,
    )


def _width(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@triton.jit(do_not_specialize=["window"])
def _attend(
    q, keys, values, out, logs, tiles, starts, lengths, tables, sinks, scale, cap, window, q_token, table_row, table_column,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """One tile, or one split of it. `scale`: of scores whose exponentials are powers of two, or of twice what the tangent of a cap sees. Sinks of a
    split tile are added where its splits are."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    segment = tl.load(tiles + 2 * tile)
    if segment < 0:
        return
    first = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(starts + segment)
    count = tl.load(starts + segment + 1) - begin
    before = tl.load(lengths + segment) - count
    row, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query, heads = first + row // GROUP, head * GROUP + row % GROUP
    keep = ((row < QUERIES * GROUP) & (query < count))[:, None] & (dim[None, :] < DIM)
    position = before + query
    token = (begin + query).to(tl.int64)
    x = tl.load(q + token[:, None] * q_token + heads[:, None] * DIM + dim[None, :], mask=keep, other=0.0)
    last = before + tl.minimum(first + QUERIES, count) - 1
    start, stop = _share(before + first, last, split, window, STEP=STEP, SPLITS=SPLITS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SUNK and SPLITS == 1:
        best, total = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634, total + 1.0
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(start, stop):
        place = step * STEP + tl.arange(0, STEP)
        there = place <= last
        page = tl.load(tables + segment * table_row + (place // PAGE) * table_column, mask=there, other=0).to(tl.int64)
        at = ((page * PAGE + place % PAGE) * KV_HEADS + head) * DIM
        k = tl.load(keys + at[None, :] + dim[:, None], mask=there[None, :] & (dim[:, None] < DIM), other=0.0)
        seen = place[None, :] <= position[:, None]
        if window > 0:
            seen = seen & (place[None, :] > position[:, None] - window)
        scores = tl.dot(x, k, input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (2 * tl.sigmoid(scores) - 1)  # tanh(x) = 2 sigmoid(2 x) - 1
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that see none of these keys
        weights, kept = tl.exp2(scores - level[:, None]), tl.exp2(best - level)
        v = tl.load(values + at[:, None] + dim[None, :], mask=there[:, None] & (dim[None, :] < DIM), other=0.0)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    divisor = tl.where(total > 0, total, 1.0)
    found = sums / divisor[:, None]
    if SPLITS == 1:
        where = (token * KV_HEADS * GROUP + heads)[:, None] * DIM + dim[None, :]
        tl.store(out + where, found.to(out.dtype.element_ty), mask=keep)
    else:  # one query a tile: a row is a head
        part = (tile * SPLITS + split).to(tl.int64) * KV_HEADS * GROUP + heads
        tl.store(out + part[:, None] * DIM + dim[None, :], found, mask=keep)
        tl.store(logs + part, best + tl.log2(divisor), mask=(row < GROUP) & (query < count))  # -inf without keys


@triton.jit
def _share(lowest, last, split, window, STEP: tl.constexpr, SPLITS: tl.constexpr):
    """(first step, step behind the last) of a split of the keys that queries at positions [lowest, last] see."""
    low = 0
    if window > 0:
        low = tl.maximum(lowest - window + 1, 0) // STEP
    steps = last // STEP + 1 - low
    share = (steps + SPLITS - 1) // SPLITS
    start = low + split * share
    return start, tl.minimum(start + share, low + steps)


@triton.jit
def _merge(
    parts, logs, out, tiles, starts, sinks,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SPLITS_WIDE: tl.constexpr,
    SUNK: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of one query of one head: each is a mean over its keys, and the logarithm of their weights' sum."""
    tile, head = tl.program_id(0), tl.program_id(1)
    segment = tl.load(tiles + 2 * tile)
    if segment < 0:
        return
    split, dim = tl.arange(0, SPLITS_WIDE), tl.arange(0, WIDTH)
    part, there = (tile * SPLITS + split).to(tl.int64) * HEADS + head, split < SPLITS
    log = tl.load(logs + part, mask=there, other=float("-inf"))
    best = tl.max(log, 0)  # some split has keys: a query sees itself
    weight = tl.exp2(log - best)
    total = tl.sum(weight, 0)
    if SUNK:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - best)
    x = tl.load(parts + part[:, None] * DIM + dim[None, :], mask=there[:, None] & (dim[None, :] < DIM), other=0.0)
    found = tl.sum(x * weight[:, None], 0) / total
    at = (tl.load(starts + segment).to(tl.int64) * HEADS + head) * DIM
    tl.store(out + at + dim, found.to(out.dtype.element_ty), mask=dim < DIM)
