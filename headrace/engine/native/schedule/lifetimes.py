"""Estimates the lengths of completions, and from them the number of blocks that the running sequences will need.

Admitting by what is free now would let in sequences that soon push each other out again (each time for the price of
computing everything anew); admitting by max_tokens leaves most of the cache empty where completions are much shorter. So the
peak of what is to come is estimated, as LightLLM does (Gong et al., Past-Future Scheduler, ASPLOS 2025): sequences that end
early free their blocks before others need theirs.
"""

from __future__ import annotations

import numpy as np

from headrace.engine.native.forward_pass import BLOCK
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
        """The expected number of further tokens. A sequence longer than the mean is expected to need another block."""
        return np.minimum(np.maximum(self._share * limit - counter, BLOCK), limit - counter)

    def peak(self, running: Running, own: np.ndarray, candidate: Sequence, new: int) -> float:
        """Blocks that will be needed at once, beyond those that are held now, with the candidate among those that run.

        `own` [len(running)]: blocks that are free when a row ends. `new`: those that the candidate needs to begin with.
        """
        columns, limit = running.columns[: len(running)], candidate.request.sampling.max_tokens
        known = np.append(columns["known"], len(candidate.tokens))
        limits = np.append(columns["limit"], limit)
        left = self._to_come(limits, np.append(columns["counter"], len(candidate.tokens) - candidate.prompt))
        room = np.append(columns["blocks"], -(-len(candidate.tokens) // BLOCK)) * BLOCK - known
        order = np.argsort(left)
        left, room, freed = left[order], room[order], np.append(own, new)[order]
        there = np.arange(len(left), 0, -1)  # at the moment when the k-th ends, itself and those that end later
        room_there = np.cumsum(room[::-1])[::-1]
        growth = (left * there - room_there) / BLOCK + there / 2  # half a block each is filled by half
        return new + max(0.0, float((growth - (np.cumsum(freed) - freed)).max()))
