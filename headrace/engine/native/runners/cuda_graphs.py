"""Decoding passes as CUDA graphs: captured once for each size, then replayed without Python and without launches.

A batch in which every segment is one token is filled up to the next size (`padding.fill_up`: added tokens write to a block
that no sequence reads), copied into buffers that never move, and replayed. Everything but the capture itself runs on a CPU,
too, and is tested there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.runners.attention import PagedCache, Pass
from headrace.engine.native.runners.padding import fill_up
from headrace.native.memory import uploaded

MAX_ROWS = 1024
"""Larger batches keep a GPU busy without graphs."""


def rows_bucket(rows: int) -> int:
    """1, 2, 4, 8, 16, then multiples of 16, from 256 on of 64: at most half, later a few per cent of the rows are filling."""
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = 16 if rows <= 256 else 64
    return -(-rows // step) * step


def width_bucket(width: int) -> int:
    """Powers of two from 4 blocks (128 tokens)."""
    return max(4, 1 << (width - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The inputs of one size, at addresses that stay."""

    tokens: torch.Tensor
    """[B] int64, as are the next two"""
    positions: torch.Tensor
    where: torch.Tensor
    tables: torch.Tensor
    """[B, W] int64"""
    starts: torch.Tensor
    """[B + 1] int32: every segment is one token. It and the next two are for the kernel that reads pages."""
    lengths: torch.Tensor
    """[B] int32"""
    narrow: torch.Tensor
    """[B, W] int32: the tables again."""

    def fill(self, batch: ForwardInput) -> None:
        """`batch`: of this size."""
        positions = batch.context.astype(np.int64)
        where = batch.tables[np.arange(len(positions)), positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        fresh = (batch.tokens, positions, where, batch.tables, positions + 1, batch.tables)
        kept = (self.tokens, self.positions, self.where, self.tables, self.lengths, self.narrow)
        for buffer, array in zip(kept, fresh, strict=True):
            buffer.copy_(torch.from_numpy(np.ascontiguousarray(array)), non_blocking=True)

    def attention(self, cache: PagedCache) -> Pass:
        longest = self.tables.shape[1] * BLOCK
        paged = (self.starts, self.lengths, self.narrow, 1, longest) if cache.kernel is not None else None
        return Pass(cache=cache, positions=self.positions, where=self.where, tables=self.tables, paged=paged)


def _buffers(rows: int, width: int, device: torch.device) -> Buffers:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Buffers(
        tokens=zeros(rows),
        positions=zeros(rows),
        where=zeros(rows),
        tables=zeros(rows, width),
        starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
        lengths=zeros(rows, dtype=torch.int32),
        narrow=zeros(rows, width, dtype=torch.int32),
    )


Step = Callable[[torch.Tensor, Pass], torch.Tensor]
"""tokens [B] and their attention -> hidden states [B, H], in which nothing waits for the GPU and no shape depends on a value."""


class DecodeGraphs:
    """`capture` off runs the step on the filled buffers each time, as a CPU must."""

    def __init__(self, step: Step, cache: PagedCache, capture: bool) -> None:
        self._step, self._cache, self.capture = step, cache, capture
        self._buffers: dict[tuple[int, int], Buffers] = {}
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def takes(self, batch: ForwardInput) -> bool:
        rows = len(batch.tokens)
        return rows == len(batch.context) <= MAX_ROWS and not batch.routing and bool((batch.adapters < 0).all())

    def forward(self, batch: ForwardInput) -> torch.Tensor:
        """Hidden states [R, H] of a batch that `takes` accepts. The head is not captured: every size would keep logits of its own."""
        size = rows_bucket(len(batch.tokens)), width_bucket(batch.tables.shape[1])
        if size not in self._buffers:
            self._buffers[size] = _buffers(*size, self._cache.device)
        self._buffers[size].fill(fill_up(batch, *size, self._cache.scratch))
        rows = uploaded(batch.rows, self._cache.device)
        hidden = self._replay(size) if self.capture else self._run(size)
        return hidden[rows]  # a copy: the next replay writes over them

    def _run(self, size: tuple[int, int]) -> torch.Tensor:
        return self._step(self._buffers[size].tokens, self._buffers[size].attention(self._cache))

    def _replay(self, size: tuple[int, int]) -> torch.Tensor:
        if size not in self._graphs:
            self._run(size)  # what is made on first use (workspaces, compiled kernels) must not be made in the capture
            torch.cuda.synchronize(self._cache.device)
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls may break a capture: meanwhile another one moves and verifies new weights.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden = self._run(size)
            self._graphs[size] = graph, hidden
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden
