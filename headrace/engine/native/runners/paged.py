"""The code that the PyTorch runners share: the cache of blocks, and exactness by cutting every pass into pieces of one size."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.attention import Geometry, PagedCache, Pass, plan_pass
from headrace.engine.native.runners.padding import EXACT_ROWS, cut, fill_up, join, require_exact
from headrace.native.memory import uploaded


class PagedRunner(ABC):
    """Half of a `Runner`; the other half is `_forward` and the weights."""

    arithmetic = ""
    experts: tuple[int, int] = (0, 0)

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device, exact: bool) -> None:
        """`exact`: logits of a token depend on its sequence alone, not on what else is in the batch, nor on how the sequence
        was cut into chunks. Every operation then sees `EXACT_ROWS` tokens at a time, and attention goes in steps of fixed size. Raises
        ConfigError where products do not keep that."""
        if exact:
            require_exact(dtype, device)
        self.dtype, self.device, self.exact = dtype, device, exact
        self.block_nbytes = geometry.block_nbytes(dtype)
        self._cache = PagedCache(geometry, dtype, device)

    def allocate(self, blocks: int) -> None:
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
