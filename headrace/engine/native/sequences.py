"""The sequences in the engine, and the content of the next forward pass over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.core.types import Request
from headrace.engine.native.draws import Settings
from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.guides import Guide, Stopper
from headrace.engine.native.kv_cache import PrefixNode

# --- The sequences in the engine
# Columns of numbers for events at every token, objects for events that happen once.


ROW = np.dtype(
    [
        ("token", np.int64),  # the last one known, not in the cache yet
        ("computed", np.int32),  # tokens in the cache
        ("known", np.int32),  # tokens there are: computed + 1 while decoding
        ("blocks", np.int32),  # in the table
        ("state", np.int32),  # the slot of its state; -1 without
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


Moves = Callable[[np.ndarray], np.ndarray]
"""Tokens [T] -> [T], by how many places each moves up what is behind it."""
SeesAhead = Callable[[np.ndarray], np.ndarray]
"""Tokens [T] -> [T], by how many tokens each sees ahead."""


@dataclass(eq=False, kw_only=True)
class EngineSequence:
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
    leader: EngineSequence | None = None
    """The sequence that computes the prompt this one waits for."""
    followers: list[EngineSequence] = field(default_factory=list)
    pinned: Pinned | None = None
    """The cache entries of a fork that waits for a row."""
    node: PrefixNode | None = None
    """The node of its last full block in the prefix cache; None if its entries are not shared."""
    tail: PrefixNode | None = None
    """The node of the next, partly filled block, if it is in the prefix cache."""
    promised: list[PrefixNode] = field(default_factory=list)
    keeps: list[tuple[int, int, int]] = field(default_factory=list)
    """States to be kept for others when it comes by: numbers of its first tokens, and the block and its serial number that each is kept for."""
    again: int = 0
    """The number of its first tokens whose entries were there, as it began: what it computes of them is computed again."""
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
    """The last one is copied where it is not used to its end."""
    computed: int
    kv_version: int


class Running:
    """Rows [0, len) are in use. A row that ends is filled with the last one."""

    def __init__(
        self, slots: int, context_length: int, moves: Moves | None = None, ahead: SeesAhead | None = None
    ) -> None:
        """`moves`: None for a model whose places are positions; `ahead`: None for one whose tokens see back alone."""
        self.slots, self._moves, self._ahead = slots, moves, ahead
        self.columns = np.zeros(slots, dtype=ROW)
        self.tables = np.zeros((slots, -(-context_length // BLOCK)), dtype=np.int32)
        self.history = np.zeros((slots, context_length + 1), dtype=np.int32)
        """All tokens of each row."""
        self.sequences: list[EngineSequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def column(self, name: str) -> np.ndarray:
        """A view of one column over the rows in use."""
        return self.columns[name][: len(self.sequences)]

    def add(
        self, sequence: EngineSequence, table: list[int], computed: int, *, kv_version: int, adapter: int, state: int
    ) -> None:
        row, request, tokens = len(self.sequences), sequence.request, sequence.tokens
        assert row < self.slots and computed < len(tokens), "admission goes by free rows; one token is always forwarded"
        sampling = request.sampling
        self.columns[row] = (
            tokens[-1],
            computed,
            len(tokens),
            len(table),
            state,
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

    def moved(self, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> np.ndarray | None:
        """Returns `ForwardInput.moved` of the tokens [start, stop) of these rows, one row after the other."""
        if self._moves is None:
            return None
        moved = [self._moves(self.history[row, :stop]) for row, stop in zip(rows, stops, strict=True)]
        return np.concatenate([(one.cumsum() - one)[start:] for one, start in zip(moved, starts, strict=True)])

    def ahead(self, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> np.ndarray | None:
        """Returns `ForwardInput.ahead` of the tokens [start, stop) of these rows, one row after the other."""
        if self._ahead is None:
            return None
        parts = [self.history[row, start:stop] for row, start, stop in zip(rows, starts, stops, strict=True)]
        found = self._ahead(np.concatenate(parts))
        return found if found.any() else None

    def end_of_chunk(self, row: int, start: int, stop: int) -> int:
        """Returns where a chunk [start, stop) of a row may end: `stop`, or where the image begins that reaches over it; behind that image, if the
        chunk would be empty."""
        if self._ahead is None or stop <= start:
            return stop
        ahead = self._ahead(self.history[row, start:stop])
        if not (left := int(ahead[-1])):
            return stop
        of_image = ahead[::-1] == left + np.arange(stop - start)
        begin = stop - (stop - start if of_image.all() else int(of_image.argmin()))
        return begin if begin > start else stop + left

    def settings(self, rows: np.ndarray | None) -> Settings:
        """Returns the sampling settings of these rows; None: of all rows."""
        chosen = self.columns[: len(self)] if rows is None else self.columns[rows]
        return Settings(**{name: chosen[name].copy() for name in _SETTINGS})


# --- The content of the next forward pass
# One token of every decoding row, and chunks of prompts.


SCORE_CHUNK = 128
"""Positions of prompts scored in one pass: each needs a row of logits as wide as the vocabulary."""


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a row that are still to be computed."""

    row: int
    start: int
    stop: int
    scores: int
    """The number of positions, from `start` on, whose logits score the next token."""
    samples: bool
    """Whether its last logits are drawn from."""


@dataclass(frozen=True)
class Plan:
    batch: ForwardInput
    decoding: np.ndarray
    """Rows, each a segment of one token; these segments come first."""
    chunks: list[Chunk]
    rows: np.ndarray
    """Rows that get a token, in the order of their logits."""
    drawn: np.ndarray | None
    """The indices of these rows among the logits; None if there are no other logits."""


class Planner:
    def __init__(self, slots: int, prefill_chunk: int, exact: bool, routing: bool) -> None:
        """`exact`: prompts are cut at multiples of the chunk from their start, whatever else there is to do."""
        self._chunk = -(-prefill_chunk // BLOCK) * BLOCK if exact else prefill_chunk
        self._exact, self._routing = exact, routing
        self._places = np.arange(slots + 1, dtype=np.int64)
        self._starts = np.arange(slots + 1, dtype=np.int32)

    def plan(self, running: Running) -> Plan | None:
        """Returns the next pass, or None if there is nothing to compute."""
        columns = running.columns[: len(running)]
        decodes = (columns["known"] - columns["computed"] == 1) & ~columns["scored"]
        count = np.count_nonzero(decodes)
        if count == len(running):
            return self._decoding(running) if count else None
        return self._mixed(running, np.flatnonzero(decodes), self._chunks(running, np.flatnonzero(~decodes)))

    def _decoding(self, running: Running) -> Plan:
        n, columns = len(running), running.columns[: len(running)]
        rows = self._places[:n]
        batch = ForwardInput(
            tokens=columns["token"].copy(),
            starts=self._starts[: n + 1],
            context=columns["computed"].copy(),
            tables=np.ascontiguousarray(running.tables[:n, : columns["blocks"].max()]),
            rows=rows,
            adapters=columns["adapter"].copy(),
            routing=self._routing,
            states=columns["state"].copy(),
            moved=running.moved(rows.tolist(), columns["computed"].tolist(), (columns["computed"] + 1).tolist()),
        )
        return Plan(batch, rows, [], rows, None)

    def _mixed(self, running: Running, decoding: np.ndarray, chunks: list[Chunk]) -> Plan:
        columns = running.columns
        rows = np.concatenate([decoding, [chunk.row for chunk in chunks]]).astype(np.int64)
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        starts = np.cumsum([0, *[1] * len(decoding), *lengths], dtype=np.int32)
        wanted, drawn = list(range(len(decoding))), list(range(len(decoding)))
        for chunk, start in zip(chunks, starts[len(decoding) :].tolist(), strict=False):
            wanted += range(start, start + chunk.scores)
            if chunk.samples:
                drawn.append(len(wanted))
                wanted.append(start + chunk.stop - chunk.start - 1)
        parts = [running.history[chunk.row, chunk.start : chunk.stop] for chunk in chunks]
        width, context = columns["blocks"][rows].max(initial=1), columns["computed"][rows]
        batch = ForwardInput(
            tokens=np.concatenate([columns["token"][decoding], *parts]),
            starts=starts,
            context=context,
            tables=np.ascontiguousarray(running.tables[rows, :width]),
            rows=np.array(wanted, dtype=np.int64),
            adapters=columns["adapter"][rows],
            routing=self._routing,
            states=columns["state"][rows],
            moved=running.moved(rows.tolist(), context.tolist(), (context + np.diff(starts)).tolist()),
            ahead=running.ahead(rows.tolist(), context.tolist(), (context + np.diff(starts)).tolist()),
        )
        sampling = np.array([*decoding, *(chunk.row for chunk in chunks if chunk.samples)], dtype=np.int64)
        return Plan(
            batch, decoding, chunks, sampling, np.array(drawn, dtype=np.int64) if len(drawn) < len(wanted) else None
        )

    def _chunks(self, running: Running, rows: np.ndarray) -> list[Chunk]:
        """First those first in order, `prefill_chunk` tokens in all (exact: more, when the first alone is longer)."""
        chunks: list[Chunk] = []
        room, scores = self._chunk, SCORE_CHUNK
        for row in sorted(rows.tolist(), key=lambda row: running.sequences[row].order):
            start, known = int(running.columns["computed"][row]), int(running.columns["known"][row])
            scored = bool(running.columns["scored"][row])
            stop = min(known, start + (min(room, scores) if scored else room))
            if self._exact:
                unit = SCORE_CHUNK if scored else self._chunk
                stop = min(known, (start // unit + 1) * unit)
                if chunks and stop - start > (min(room, scores) if scored else room):
                    break
            stop = running.end_of_chunk(row, start, stop)
            if stop <= start:
                continue
            last = running.sequences[row].prompt - 1 if scored else 0
            chunk = Chunk(
                row, start, stop, max(0, min(stop, last) - start), stop == known and bool(running.columns["limit"][row])
            )
            chunks.append(chunk)
            room, scores = room - (stop - start), scores - chunk.scores
            if room <= 0:
                break
        return chunks
