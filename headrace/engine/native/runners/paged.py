"""The code that the PyTorch runners share: batches of fixed sizes, and the cache of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import linear
from torch.nn.functional import pad as pad_tensor

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput, PassCounts, WithoutStates
from headrace.engine.native.runners.attention import Geometry, PagedCache, Pass, plan_pass
from headrace.native.uploads import uploaded

# --- Batches of a fixed size
# Cut into pieces of that many tokens, and padded with tokens that no sequence reads.
#
# Exactness needs this: a matrix product that always has the same shape always adds in the same order.


EXACT_ROWS = 48
"""Rows of every matrix product in exact mode. Libraries multiply tiles of rows, and add in another order in a smaller tile at the end: MKL in
AVX2 has tiles of 12 rows, so that of 32 rows the last 8 had other bits than the same rows elsewhere. 48 are whole tiles of 12 and of 16."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


TRIED = ((96, 64), (576, 960), (1536, 112))
"""Inputs and outputs of the products that are tried."""


def require_exact(
    dtype: torch.dtype,
    device: torch.device,
    multiply: Multiply = linear,
    shapes: Sequence[tuple[int, int]] = ((32, 51), *TRIED),
) -> None:
    """Tries products of `EXACT_ROWS` equal rows. Raises ConfigError if this machine gives a row other bits in another place."""
    for inputs, outputs in shapes:
        x, weight = (
            torch.linspace(-1, 1, size, device=device).sin().to(dtype).view(-1, inputs)
            for size in (inputs, inputs * outputs)
        )
        found = multiply(x.expand(EXACT_ROWS, -1).contiguous(), weight)
        if not bool((found == found[:1]).all()):
            raise ConfigError(
                "engine.exact = true, but products of this machine's libraries depend on a row's place in a batch; set it to false, or use "
                "the C++ kernels, which are always exact (engine.path)"
            )


def cut(batch: ForwardInput, size: int) -> Iterator[ForwardInput]:
    """Pieces of `size` tokens, the last one shorter. Run in this order they give the result of the whole batch: a later token of a
    sequence finds the earlier ones in the cache."""
    for start in range(0, len(batch.tokens), size):
        stop = min(start + size, len(batch.tokens))
        first = int(np.searchsorted(batch.starts, start, "right")) - 1
        last = int(np.searchsorted(batch.starts, stop, "left"))
        behind = np.maximum(start - batch.starts[first:last], 0)
        rows = batch.rows[(batch.rows >= start) & (batch.rows < stop)] - start
        yield replace(
            batch,
            tokens=batch.tokens[start:stop],
            starts=batch.starts[first : last + 1].clip(start, stop) - start,
            context=batch.context[first:last] + behind.astype(batch.context.dtype),
            tables=batch.tables[first:last],
            rows=rows,
            adapters=batch.adapters[first:last],
            moved=None if batch.moved is None else batch.moved[start:stop],
        )


def fill_up(batch: ForwardInput, tokens: int, width: int, scratch: int) -> ForwardInput:
    """Pads a batch to at least `tokens` tokens and `width` columns in its tables. Each added token is a sequence of its own,
    written to the block `scratch`, which no other sequence reads. The rows do not change."""
    missing = max(tokens - len(batch.tokens), 0)
    columns = max(width - batch.tables.shape[1], 0)
    tables = np.pad(batch.tables, ((0, missing), (0, columns)))
    tables[len(batch.context) :, 0] = scratch
    return replace(
        batch,
        tokens=np.pad(batch.tokens, (0, missing)),
        starts=np.concatenate([batch.starts, batch.starts[-1] + np.arange(1, missing + 1, dtype=batch.starts.dtype)]),
        context=np.pad(batch.context, (0, missing)),
        tables=tables,
        adapters=np.pad(batch.adapters, (0, missing), constant_values=-1),
        moved=None if batch.moved is None else np.pad(batch.moved, (0, missing)),
    )


def join(parts: Sequence[ForwardOutput], sizes: Sequence[int]) -> ForwardOutput:
    """The passes over the pieces of a batch as one; `sizes` are the pieces' tokens without filling."""
    routing = [part.routing[:size] for part, size in zip(parts, sizes, strict=True) if part.routing is not None]
    return ForwardOutput(torch.cat([part.logits for part in parts]), np.concatenate(routing) if routing else None)


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int) -> torch.Tensor:
    """`function` of x [n, ...], which it sees `rows` rows at a time, never more or fewer."""
    parts = [function(_filled(x[start : start + rows], rows))[: len(x) - start] for start in range(0, len(x), rows)]
    return torch.cat(parts) if parts else function(x)


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if len(x) == rows else pad_tensor(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x)))


# --- The code that the PyTorch runners share
# The cache of blocks, and exactness by cutting every pass into pieces of one size.


class PagedRunner(WithoutStates, ABC):
    """Half of a `Runner`; the other half is `_forward` and the weights."""

    arithmetic = ""

    keeps = True
    feeds = False

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, exact: bool) -> None:
        """`exact`: logits of a token depend on its sequence alone, not on what else is in the batch, nor on how the sequence
        was cut into chunks. Every operation then sees `EXACT_ROWS` tokens at a time, and attention goes in steps of fixed size. Raises
        ConfigError where products do not keep that."""
        if exact:
            require_exact(dtype, device)
        self.dtype, self.device, self.exact = dtype, device, exact
        self.block_nbytes = geometry.block_nbytes(dtype)
        self.passes = PassCounts()
        self._cache = PagedCache(geometry, dtype, device, exact)

    def allocate(self, blocks: int, states: int = 0) -> None:
        self._cache.allocate(blocks)

    def free(self) -> None:
        """Gives the cache back; the weights are the other half's."""
        self._cache.free()

    def take_out(self, blocks: np.ndarray) -> torch.Tensor:
        return self._cache.take_out(blocks)

    def put_back(self, blocks: np.ndarray, content: torch.Tensor) -> None:
        self._cache.put_back(blocks, content)

    @torch.inference_mode()
    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        self._cache.copy(source, target)

    @torch.inference_mode()
    def clear_blocks(self, blocks: np.ndarray) -> None:
        self._cache.clear(blocks)

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> ForwardOutput:
        if not self.exact:
            return self._forward(batch)
        pieces = list(cut(batch, EXACT_ROWS))
        parts = [self._forward(fill_up(piece, EXACT_ROWS, 0, self._cache.scratch)) for piece in pieces]
        return join(parts, [len(piece.tokens) for piece in pieces])

    @abstractmethod
    def _forward(self, batch: ForwardInput) -> ForwardOutput: ...

    def _plan(self, batch: ForwardInput) -> Pass:
        return plan_pass(batch, self._cache, self.exact)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return uploaded(array, self.device)
