"""The running sequences: columns of numbers for what happens at every token, objects for what happens once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.engine.native.sampler import Settings
from headrace.engine.native.stopping import Stopper
from headrace.types import Request

ROW = np.dtype(
    [
        ("token", np.int64),  # sampled last, not in the cache yet
        ("length", np.int64),  # tokens in the cache: the position of `token`
        ("counter", np.int64),  # tokens of the completion so far, those of a re-issued prefix included
        ("limit", np.int64),  # max_tokens
        ("kv_version", np.int64),  # oldest weights among the row's cache entries
        ("ends_at_eos", np.bool_),
        ("watched", np.bool_),  # has stop tokens or strings of its own
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
    ]
)


@dataclass
class Sequence:
    """One accepted request. `row` is its place among the running ones, -1 before it has one."""

    request: Request
    tokens: tuple[int, ...]
    """What must be in the cache before sampling begins: the prompt and, for a re-issued request, its prefix."""
    stopper: Stopper | None
    row: int = -1

    @property
    def id(self) -> str:
        return self.request.id


class Running:
    """Rows [0, len) are in use. A row that ends is filled with the last one, in the columns here as in the cache."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.columns = np.zeros(slots, dtype=ROW)
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def column(self, name: str) -> np.ndarray:
        """A view of one column over the rows in use."""
        return self.columns[name][: len(self.sequences)]

    def add(self, sequence: Sequence, kv_version: int) -> int:
        assert len(self.sequences) < self.slots, "admission goes by free slots"
        row, sampling = len(self.sequences), sequence.request.sampling
        self.columns[row] = (
            0,
            len(sequence.tokens),
            len(sequence.request.prefix),
            sampling.max_tokens,
            kv_version,
            not sampling.ignore_eos,
            sequence.stopper is not None,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed & 0xFFFFFFFFFFFFFFFF,
        )
        sequence.row = row
        self.sequences.append(sequence)
        return row

    def remove(self, row: int) -> int:
        """The row whose cache must be moved to `row` (the last one; `row` itself when that was the last)."""
        self.sequences[row].row = -1
        moved = self.sequences.pop()
        last = len(self.sequences)
        if row != last:
            self.columns[row] = self.columns[last]
            self.sequences[row] = moved
            moved.row = row
        return last

    def settings(self) -> Settings:
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "counter")
        return Settings(*(self.column(name).copy() for name in names))
