"""The experts that each position in the KV cache was routed to, stored in blocks like those of the cache."""

from __future__ import annotations

import numpy as np

from headrace.core.types import RoutingTrace
from headrace.engine.native.forward_pass import BLOCK, ForwardInput


class RecordedRouting:
    def __init__(self, blocks: int, layers: int, k: int) -> None:
        self._shape = (blocks, BLOCK, layers, k)
        self._experts: np.ndarray | None = None
        """Made when the first pass shows how wide an expert's number is."""

    def record(self, batch: ForwardInput, chosen: np.ndarray) -> None:
        """`chosen` [N, layers, K]."""
        if self._experts is None:
            self._experts = np.zeros(self._shape, dtype=chosen.dtype)
        positions = batch.positions()
        self._experts[batch.tables[batch.segments(), positions // BLOCK], positions % BLOCK] = chosen

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        if self._experts is not None:
            self._experts[target] = self._experts[source]

    def trace(self, table: list[int], tokens: int) -> RoutingTrace:
        """Returns the experts of the first `tokens` positions of a block table."""
        _, _, layers, k = self._shape
        if self._experts is None or not table:
            return RoutingTrace(layers, k, 1, b"")
        chosen = self._experts[table].reshape(-1, layers, k)[:tokens]
        return RoutingTrace(layers, k, chosen.itemsize, chosen.tobytes())
