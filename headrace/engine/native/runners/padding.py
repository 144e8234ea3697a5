"""Batches of a fixed size: cut into pieces of that many tokens, and padded with tokens that no sequence reads.

Two need this: exactness (a matrix product that always has the same shape always adds in the same order) and CUDA graphs
(which replay the shapes they were captured with).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import linear
from torch.nn.functional import pad as pad_tensor

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput

EXACT_ROWS = 48
"""Rows of every matrix product in exact mode. Libraries multiply tiles of rows, and add in another order in a smaller tile at the end: MKL in
AVX2 has tiles of 12 rows, so that of 32 rows the last 8 had other bits than the same rows elsewhere. 48 are whole tiles of 12 and of 16."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def require_exact(dtype: torch.dtype, device: torch.device, multiply: Multiply = linear) -> None:
    """Tries products of `EXACT_ROWS` equal rows. Raises ConfigError if this machine gives a row other bits in another place."""
    for inputs, outputs in ((32, 51), (96, 64), (576, 960), (1536, 112)):
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
