"""How long completions turn out to be: what admission leaves free for those that run already.

Admitting by what is free now would let in sequences that soon push each other out again (each time for the price of
computing everything anew); admitting by max_tokens leaves most of the cache empty where completions are much shorter.
"""

from __future__ import annotations

import numpy as np

from headrace.engine.native.batch import BLOCK
from headrace.engine.native.schedule.sequences import Running, Sequence

MEMORY = 32
"""Completions over which the mean is taken (exponentially weighted)."""


class Lifetimes:
    def __init__(self) -> None:
        self._share = 1.0
        """Mean length as a share of max_tokens. Before any has ended, the worst case."""

    def record(self, limit: int, tokens: int) -> None:
        if limit:
            self._share += (tokens / limit - self._share) / MEMORY

    def _to_come(self, limit: np.ndarray, counter: np.ndarray) -> np.ndarray:
        """Tokens. Whoever has passed the mean is expected to need another block."""
        return np.minimum(np.maximum(self._share * limit - counter, BLOCK), limit - counter)

    def blocks_to_come(self, running: Running) -> int:
        columns = running.columns[: len(running)]
        tokens = columns["known"] + self._to_come(columns["limit"], columns["counter"])
        return int(np.maximum(np.ceil(tokens / BLOCK) - columns["blocks"], 0).sum())

    def expected_blocks(self, sequence: Sequence) -> int:
        """Beside those that its tokens need now."""
        known, limit = len(sequence.tokens), np.array(sequence.request.sampling.max_tokens)
        tokens = known + self._to_come(limit, np.array(known - sequence.prompt))
        return int(np.ceil(tokens / BLOCK)) - -(-known // BLOCK)
