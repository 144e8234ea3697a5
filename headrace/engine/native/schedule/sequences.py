"""The sequences in the engine: columns of numbers for events at every token, objects for events that happen once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.core.types import Request
from headrace.engine.native.cache.prefixes import PrefixNode
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.sampling.guides import Guide
from headrace.engine.native.sampling.sampler import Settings
from headrace.engine.native.sampling.stopping import Stopper

ROW = np.dtype(
    [
        ("token", np.int64),  # the last one known, not in the cache yet
        ("computed", np.int32),  # tokens in the cache
        ("known", np.int32),  # tokens there are: computed + 1 while decoding
        ("blocks", np.int32),  # in the table
        ("counter", np.int64),  # tokens of the completion so far, those of a re-issued prefix included
        ("limit", np.int64),  # max_tokens
        ("kv_version", np.int64),  # oldest weights among the cache entries; -1 before there are any
        ("adapter", np.int32),  # its slot; -1 without
        ("ends_at_eos", np.bool_),
        ("watched", np.bool_),  # has stop tokens or strings of its own
        ("scored", np.bool_),  # log-probs of its prompt are still to be computed
        ("fresh", np.bool_),  # no logits of it have been seen to be finite
        ("mask", np.bool_),  # the sampling mask is wanted
        ("adjusted", np.bool_),  # has a constraint, or a bias, that changes its logits
        ("top", np.int32),  # most probable tokens wanted
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
    ]
)
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "counter")


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One accepted request."""

    request: Request
    tokens: tuple[int, ...]
    """The tokens that must be in the cache before sampling continues. While the sequence has a row, later tokens are in the
    row's history."""
    prompt: int
    """The number of `tokens` that belong to the prompt."""
    arrival: int
    adapter: str = ""
    said: tuple[int, ...] = ()
    """The tokens of its completion before it came here: its prefix, or what a fork keeps of its source's."""
    stopper: Stopper | None = None
    guide: Guide | None = None
    """Its place in the language of its constraint, after all tokens of its completion."""
    scored: bool = False
    """Log-probs of its prompt are still owed."""
    scores: list[Any] = field(default_factory=list)
    """The scores of the prompt so far, chunk by chunk."""
    begun: bool = False
    """Had a row before, here or in an engine that died: one that drains still finishes it."""
    row: int = -1
    """Its index among the running sequences; -1 if it does not run."""
    gone: bool = False
    leader: Sequence | None = None
    """The sequence that computes the prompt this one waits for."""
    followers: list[Sequence] = field(default_factory=list)
    pinned: Pinned | None = None
    """The cache entries of a fork that waits for a row."""
    node: PrefixNode | None = None
    """The node of its last full block in the prefix cache; None if its entries are not shared."""
    tail: PrefixNode | None = None
    """The node of the next, partly filled block, if it is in the prefix cache."""
    promised: list[PrefixNode] = field(default_factory=list)
    verified: int = 0
    """Blocks whose entries finite logits have vouched for."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def order(self) -> tuple[int, int]:
        """Lower goes first."""
        return self.request.priority, self.arrival


@dataclass(frozen=True)
class Pinned:
    """Blocks that are held for a sequence that has no row yet."""

    blocks: list[int]
    """The last one is to be copied when it is not used to its end."""
    computed: int
    kv_version: int

    @property
    def whole(self) -> int:
        """Blocks that can be shared as they are."""
        return self.computed // BLOCK


class Running:
    """Rows [0, len) are in use. A row that ends is filled with the last one."""

    def __init__(self, slots: int, context_length: int) -> None:
        self.slots = slots
        self.columns = np.zeros(slots, dtype=ROW)
        self.tables = np.zeros((slots, -(-context_length // BLOCK)), dtype=np.int32)
        self.history = np.zeros((slots, context_length + 1), dtype=np.int32)
        """All tokens of each row."""
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def column(self, name: str) -> np.ndarray:
        """A view of one column over the rows in use."""
        return self.columns[name][: len(self.sequences)]

    def add(self, sequence: Sequence, table: list[int], computed: int, kv_version: int, adapter: int) -> None:
        row, request, tokens = len(self.sequences), sequence.request, sequence.tokens
        assert row < self.slots and computed < len(tokens), "admission goes by free rows; one token is always forwarded"
        sampling = request.sampling
        self.columns[row] = (
            tokens[-1],
            computed,
            len(tokens),
            len(table),
            len(tokens) - sequence.prompt,
            sampling.max_tokens,
            kv_version,
            adapter,
            not sampling.ignore_eos,
            sequence.stopper is not None,
            sequence.scored,
            True,
            request.return_mask,
            sequence.guide is not None or bool(sampling.logit_bias),
            request.top_logprobs,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed & 0xFFFFFFFFFFFFFFFF,
        )
        self.tables[row, : len(table)] = table
        self.history[row, : len(tokens)] = tokens
        sequence.row = row
        self.sequences.append(sequence)

    def remove(self, row: int) -> None:
        self.sequences[row].row = -1
        moved, last = self.sequences.pop(), len(self.sequences)
        self.tables[row] = 0
        if row != last:
            columns = self.columns[row] = self.columns[last]
            self.tables[row] = self.tables[last]
            self.tables[last] = 0
            self.history[row, : columns["known"]] = self.history[last, : columns["known"]]
            self.sequences[row] = moved
            moved.row = row

    def append(self, row: int, block: int) -> None:
        """One more block at the end of the row's table."""
        self.tables[row, self.columns["blocks"][row]] = block
        self.columns["blocks"][row] += 1

    def table(self, row: int) -> list[int]:
        return self.tables[row, : self.columns["blocks"][row]].tolist()

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        return tuple(self.history[row, start : self.columns["known"][row] if stop is None else stop].tolist())

    def settings(self, rows: np.ndarray | None) -> Settings:
        """Returns the sampling settings of these rows; None: of all rows."""
        chosen = self.columns[: len(self)] if rows is None else self.columns[rows]
        return Settings(**{name: chosen[name].copy() for name in _SETTINGS})
