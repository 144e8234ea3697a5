"""Passes as CUDA graphs: captured once for each size, then replayed without Python and without launches.

A batch is copied into buffers that never move, filled up to the next size, and replayed. What fills up writes to a block that no sequence
reads. Rows may use adapters, experts are reported, and where a kernel reads pages (`pages.py`) chunks of prompts may be beside decoding rows:
all that differs between passes lies in the buffers. Everything but the capture itself runs on a CPU, too, and is tested there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.runners.attention import PagedCache, Pass
from headrace.engine.native.runners.pages import Pages, Tiles, places, processors, splits, tile_queries
from headrace.native.uploads import sent

log = logging.getLogger(__name__)

MAX_ROWS = 1024
"""Larger batches keep a GPU busy without graphs."""
MAX_TOKENS = 4096
"""Tokens above which passes with chunks of prompts keep a GPU busy without graphs."""
CHUNKS = 32
"""Chunks of prompts that a captured pass has room for whatever their lengths."""


def rows_bucket(rows: int) -> int:
    """1, 2, 4, 8, 16, then multiples of 16, from 256 on of 64: at most half, later a few per cent of the rows are filling."""
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = 16 if rows <= 256 else 64
    return -(-rows // step) * step


def tokens_bucket(tokens: int) -> int:
    """Sizes of passes with chunks: 32, 48, 64, 96, 128, 192, ...: at most a third is filling."""
    power = 1 << (max(tokens, 32) - 1).bit_length()
    return power * 3 // 4 if max(tokens, 32) <= power * 3 // 4 else power


def width_bucket(width: int) -> int:
    """Powers of two from 4 blocks (128 tokens)."""
    return max(4, 1 << (width - 1).bit_length())


class Size(NamedTuple):
    """The shape of one capture."""

    tokens: int
    width: int
    """Blocks of the longest sequence that there is room for."""
    mixed: bool = False
    """Whether segments may have more than one token."""


class Buffers:
    """The inputs of one size, at addresses that stay: views of one tensor, filled by one copy."""

    def __init__(self, size: Size, cache: PagedCache) -> None:
        tokens, width, mixed = size
        self._cache, self._queries = cache, tile_queries(cache.geometry.heads // cache.geometry.kv_heads)
        wide = np.int32 if cache.kernel is not None else np.int64
        tiles = -(-tokens // self._queries) + CHUNKS if mixed else 0
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            **dict.fromkeys(("tokens", "positions", "where", "adapters"), ((tokens,), np.int64)),
            "rows": ((tokens,), np.int64),
            "starts": ((tokens + 1,), np.int32),
            "lengths": ((tokens,), np.int32),
            "singles": ((tokens, 2), np.int32),
            "chunks": ((tiles, 2), np.int32),
            "tables": (
                (width, tokens),
                wide,
            ),  # last, and a row for each column, so that what is not needed is not copied
        }
        starts = [0]
        for shape, dtype in shapes.values():
            starts.append(starts[-1] + -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 16) * 16)
        self._host = np.zeros(starts[-1], np.uint8)
        self._device = torch.zeros(starts[-1], dtype=torch.uint8, device=cache.device)
        self._at, self._row_nbytes = starts[-2], tokens * np.dtype(wide).itemsize
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        for (name, (shape, dtype)), start in zip(shapes.items(), starts[:-1], strict=True):
            stop = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.host[name] = self._host[start:stop].view(dtype).reshape(shape)
            kind = torch.int32 if dtype is np.int32 else torch.int64
            self.device[name] = self._device[start:stop].view(kind).view(shape)
        self.fill(None)

    def room_for(self, chunks: int) -> bool:
        """`chunks`: tiles of the longer segments of a pass."""
        return chunks <= len(self.host["chunks"])

    def fill(self, batch: ForwardInput | None) -> None:
        """`batch`: not larger than the size; None: nothing but what fills up."""
        host, scratch = self.host, self._cache.scratch
        for name in ("tokens", "positions", "lengths", "starts"):
            host[name].fill(0)
        host["lengths"].fill(1)
        host["where"].fill(scratch * BLOCK)
        for name in ("adapters", "singles", "chunks"):
            host[name].fill(-1)
        host["tables"][0].fill(scratch)
        used = 1
        if batch is not None:
            used = self._put(batch)
        stop = self._at + used * self._row_nbytes
        sent(self._host[:stop], self._device[:stop])

    def _put(self, batch: ForwardInput) -> int:
        host, sizes, positions, segments = self.host, np.diff(batch.starts), batch.positions(), batch.segments()
        count, rows, used = len(positions), len(sizes), int(positions.max()) // BLOCK + 1
        host["tokens"][:count], host["positions"][:count] = batch.tokens, positions
        host["rows"][: len(batch.rows)] = batch.rows
        blocks = batch.tables[segments, positions // BLOCK].astype(np.int64)
        host["where"][:count] = blocks * BLOCK + positions % BLOCK
        host["adapters"][:count] = batch.adapters[segments]
        host["starts"][: rows + 1] = batch.starts
        host["lengths"][:rows] = batch.context + sizes
        for name, found in zip(("singles", "chunks"), places(sizes, self._queries), strict=True):
            host[name][: len(found)] = found
        host["tables"][:used, :rows] = batch.tables[:, :used].T
        return used

    def attention(self) -> Pass:
        cache, device = self._cache, self.device
        tables = device["tables"].T
        made = Pass(cache=cache, positions=device["positions"], where=device["where"])
        if cache.kernel is None:
            made.tables = tables
            return made
        split = splits(len(device["singles"]), cache.geometry.kv_heads, processors(cache.device))
        tiles = [Tiles(device["singles"], 1, split)]
        tiles += [Tiles(device["chunks"], self._queries)] if len(device["chunks"]) else []
        made.paged = Pages(device["starts"], device["lengths"], tables, tiles)
        return made


class Passed(NamedTuple):
    hidden: torch.Tensor
    """[N, H]"""
    routing: torch.Tensor | None
    """[N, layers with experts, K] of a mixture."""


Step = Callable[[torch.Tensor, Pass, torch.Tensor], Passed]
"""tokens [N], their attention, their adapters' slots [N] -> the pass, in which nothing waits for the GPU and no shape depends on a value."""

Capture = Callable[[Callable[[], Passed]], tuple[Callable[[], None], Passed]]
"""Captures a function without arguments. Returns what replays it, and its result, which every replay writes again."""


def on_cuda(device: torch.device) -> Capture:  # pragma: no cover - needs CUDA
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], Passed]) -> tuple[Callable[[], None], Passed]:
        function()  # what is made on first use (workspaces, compiled kernels) must not be made in the capture
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may break a capture: meanwhile another one moves and verifies new weights.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            found = function()
        return graph.replay, found

    return capture


class PassGraphs:
    """`capture`: None runs the step on the filled buffers each time, as a CPU must."""

    def __init__(self, step: Step, cache: PagedCache, capture: Capture | None, context: int) -> None:
        """`context`: the most tokens of a sequence."""
        self._step, self._cache, self.capture = step, cache, capture
        self._whole = -(-context // BLOCK)
        self._serving = True
        self._buffers: dict[Size, Buffers] = {}
        self._graphs: dict[Size, tuple[Callable[[], None], Passed]] = {}
        self.used: set[Size] = set()
        """Sizes of the batches that were forwarded. From the first one on, captures are in the way of decoding."""

    def forget(self) -> None:
        """Drops what was captured, because addresses in it are no longer in use."""
        self._graphs.clear()

    @torch.inference_mode()
    def prepare(self, rows: int, tokens: int) -> int:
        """Captures the sizes of up to `rows` decoding rows, and of passes of up to `tokens` with chunks; if batches have been forwarded, their
        sizes alone. Returns how many graphs there are then."""
        if self.capture is not None and self._cache.kernel is not None:
            planned = list(self._planned(min(rows, MAX_ROWS), min(tokens, MAX_TOKENS)))
            self._serving = False
            for size in [size for size in planned if size in self.used] if self.used else planned:
                self._filled_buffers(size).fill(None)
                self._run(size)
            self._serving = True
        return len(self._graphs)

    def _planned(self, rows: int, tokens: int) -> Iterator[Size]:
        """Largest first, so that the smaller ones find memory."""
        mixed = {tokens_bucket(count) for count in range(1, tokens + 1)}
        alone = {rows_bucket(count) for count in range(1, rows + 1)}
        yield from (Size(count, self._whole, mixed=True) for count in sorted(mixed, reverse=True))
        yield from (Size(count, self._whole) for count in sorted(alone, reverse=True))

    def refusal(self, batch: ForwardInput) -> str:
        """Empty, or the reason why this batch is not replayed."""
        tokens, rows = len(batch.tokens), len(batch.context)
        if tokens == rows:
            return "" if rows <= MAX_ROWS else f"more than {MAX_ROWS} rows"
        if self._cache.kernel is None:
            return "prompt chunks, which no kernel reads from pages here"
        if tokens > MAX_TOKENS:
            return f"more than {MAX_TOKENS} tokens"
        buffers = self._filled_buffers(self._size(batch))
        _, chunks = places(
            np.diff(batch.starts), tile_queries(self._cache.geometry.heads // self._cache.geometry.kv_heads)
        )
        return "" if buffers.room_for(len(chunks)) else f"more than {CHUNKS} prompt chunks"

    def _size(self, batch: ForwardInput) -> Size:
        tokens = len(batch.tokens)
        width = width_bucket(batch.tables.shape[1]) if self._cache.kernel is None else self._whole
        mixed = tokens > len(batch.context)
        return Size(tokens_bucket(tokens) if mixed else rows_bucket(tokens), width, mixed)

    def forward(self, batch: ForwardInput) -> Passed:
        """The hidden states [R, H] of the rows, and the experts of all tokens, of a batch without `refusal`. The head is not captured: every
        size would keep logits of its own."""
        size = self._size(batch)
        self.used.add(size)
        buffers = self._filled_buffers(size)
        buffers.fill(batch)
        if batch.fed is not None:
            buffers.device["tokens"][: len(batch.fed)].copy_(batch.fed)
        rows = buffers.device["rows"][: len(batch.rows)]
        hidden, routing = self._run(size)
        # Copies: the next replay writes over them.
        return Passed(hidden[rows], routing[: len(batch.tokens)] if routing is not None and batch.routing else None)

    def _filled_buffers(self, size: Size) -> Buffers:
        if size not in self._buffers:
            self._buffers[size] = Buffers(size, self._cache)
        return self._buffers[size]

    def _run(self, size: Size) -> Passed:
        buffers = self._filled_buffers(size)

        def step() -> Passed:
            return self._step(buffers.device["tokens"], buffers.attention(), buffers.device["adapters"])

        if self.capture is None:
            return step()
        if size not in self._graphs:
            if self._serving and self._cache.kernel is not None:
                log.warning("a CUDA graph of %d tokens is captured between two passes", size.tokens)
            self._graphs[size] = self.capture(step)
        replay, found = self._graphs[size]
        replay()
        return found
