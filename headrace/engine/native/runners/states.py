"""States of sequences, in cache objects of transformers: found by tokens and weights, copied, cut, forgotten.

The scheduler's blocks hold no keys and values here, but a *mark* for each token: the token itself, and the weights that it was computed under.
A state is one cache object, or a row of one that several sequences share, with the marks of all its tokens. It serves a sequence whose blocks
hold the same marks, so that no state of other tokens or of other weights is ever used: not after a block was given away, not after a swap.

Attention keeps keys and values by position, and a copy of it can be cut short. What recurrent layers keep, and windows that have moved on,
cannot: those states are copied where somebody may want to continue from them, and computed again elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.runners.cache_rows import joined, sizes_of

_SHARED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
"""Layers that put new tensors in place of old ones and never write into them: a copy may share the tensors."""
_MOST = 256
"""States that are kept, or four for each sequence of a pass if those are more: looking through them takes time."""


# --- One state


@dataclass(eq=False)
class State:
    """The cache of one sequence's first tokens."""

    kept: dict[str, Any]
    """The values that transformers' `generate` hands from pass to pass: a cache, or a list of states under the name that the model gives it. Those
    of all rows, if the state is a row."""
    marks: np.ndarray
    """[T] int64: the mark of each token."""
    rows: Rows | None = None
    """The sequences that share the cache; None if it is this one's alone."""
    row: int = 0

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes(self) if self.rows else sum(tensor.nbytes for tensor in tensors_of(self.kept))

    @property
    def can_be_cut(self) -> bool:
        """Whether `copied` gives the state of fewer tokens."""
        cache, tokens = self.kept.get("cache"), len(self.marks)
        return isinstance(cache, Cache) and bool(cache.layers) and all(_can_be_cut(one, tokens) for one in cache.layers)

    def copied(self, tokens: int) -> State:
        """A state of the first `tokens` tokens, which changes nothing of this one."""
        kept = self._alone() if self.rows else {name: _copied(value) for name, value in self.kept.items()}
        if (removed := len(self.marks) - tokens) > 0:
            assert self.can_be_cut
            kept["cache"].crop(-removed)
        return State(kept, self.marks[:tokens])

    def part(self) -> None:
        """Takes a copy of its row, if it is one, and leaves the others."""
        if self.rows is not None:
            self.kept, self.rows, self.row = self._alone(), None, 0

    def _alone(self) -> dict[str, Any]:
        return {"cache": joined([(self.kept["cache"], [self.row])], len(self.marks))}


class Rows:
    """States that are the rows of one cache. All end in its last column, and a shorter one has padding at its left."""

    def __init__(self, states: Sequence[State], kept: dict[str, Any]) -> None:
        """Makes these states the rows of a cache, in this order. `kept`: what the model handed back, with that cache."""
        self._states = [ref(state) for state in states]
        self.lengths = np.array([len(state.marks) for state in states])
        for row, state in enumerate(states):
            state.rows, state.row = self, row
        self._hold(kept)

    @classmethod
    def of(cls, states: Sequence[State]) -> Rows:
        """The cache of these states and of no others. Those that shared one with them keep it."""
        before = states[0].rows
        if before is not None and len(before) == len(states) and all(state.rows is before for state in states):
            return before
        parts: dict[int, list[State]] = {}
        for state in states:
            parts.setdefault(id(state.kept["cache"]), []).append(state)
        pieces = [(some[0].kept["cache"], [state.row for state in some]) for some in parts.values()]
        together = joined(pieces, max(len(state.marks) for state in states))
        return cls([state for some in parts.values() for state in some], {"cache": together})

    def __len__(self) -> int:
        return len(self._states)

    @property
    def columns(self) -> int:
        return int(self.lengths.max())

    def advance(self, kept: dict[str, Any], marks: Sequence[np.ndarray]) -> None:
        """Every row has a token more. `kept`: as the model handed it back; `marks`: all of each row, in order."""
        self.lengths = self.lengths + 1
        for state in self._here():
            state.marks = marks[state.row]
        self._hold(kept)

    def _hold(self, kept: dict[str, Any]) -> None:
        self.kept = kept
        for state in self._here():
            state.kept = kept
        fixed, growing = sizes_of(kept["cache"])
        self._fixed, self._each = fixed // len(self), growing // (len(self) * self.columns)

    def nbytes(self, state: State) -> int:
        """Bytes of a row, without its padding: a pass of short sequences beside a long one shall not push them out of memory."""
        return self._fixed + self._each * len(state.marks)

    def part(self) -> None:
        """Gives those that are still rows a cache of their own."""
        for state in self._here():
            state.part()

    def _here(self) -> Iterator[State]:
        for found in self._states:
            if (state := found()) is not None and state.rows is self:
                yield state


def is_plain(layer: Any) -> bool:
    """Whether a cache layer keeps keys and values by position and nothing else."""
    return type(layer) in _SHARED


def _can_be_cut(layer: Any, tokens: int) -> bool:
    if type(layer) is DynamicSlidingWindowLayer:
        return bool(tokens < layer.sliding_window)  # nothing has left the window yet
    return is_plain(layer)


def _copied(value: Any) -> Any:
    if not isinstance(value, Cache):
        return deepcopy(value)
    cache = copy(value)
    cache.layers = [copy(layer) if is_plain(layer) else deepcopy(layer) for layer in value.layers]
    return cache


def tensors_of(value: Any, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor inside, once."""
    seen = set() if _seen is None else _seen
    if id(value) in seen or value is None or isinstance(value, str | int | float | type | torch.dtype | torch.device):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, dict):
        inside = list(value.values())
    else:
        inside = list(value) if isinstance(value, list | tuple) else list(getattr(value, "__dict__", {}).values())
    for part in inside:
        yield from tensors_of(part, seen)


# --- The marks of tokens in the scheduler's blocks


class MarkedBlocks:
    """[blocks, BLOCK] int64 marks: weights << 32 | token, weights counted from 1; 0 where there are none."""

    def __init__(self, blocks: int) -> None:
        self.marks = np.zeros((blocks, BLOCK), dtype=np.int64)
        self._owed = np.zeros((blocks, BLOCK), dtype=bool)
        """Tokens that were put into a block, and not forwarded yet."""

    def write(self, table: np.ndarray, start: int, marks: np.ndarray, owed: bool) -> None:
        """`table` [W]: the sequence's blocks; `start`: position of the first of `marks`."""
        places = np.arange(start, start + len(marks))
        self.marks[table[places // BLOCK], places % BLOCK] = marks
        self._owed[table[places // BLOCK], places % BLOCK] = owed

    def read(self, table: np.ndarray, tokens: int) -> np.ndarray:
        """[tokens]: the marks of a sequence's first tokens."""
        return self.marks[table[: -(-tokens // BLOCK)]].reshape(-1)[:tokens]

    def owes(self, table: np.ndarray, tokens: int) -> bool:
        """Whether one of a sequence's first tokens was not forwarded yet."""
        return bool(self._owed[table[: -(-tokens // BLOCK)]].reshape(-1)[:tokens].any())

    def forwarded(self, table: np.ndarray, tokens: int) -> int:
        """Says that a sequence's first tokens were forwarded, all of them now. Returns the number of those that had been before."""
        blocks = table[: -(-tokens // BLOCK)]
        places = np.arange(tokens)
        owed = int(self._owed[blocks].reshape(-1)[:tokens].sum())
        self._owed[blocks[places // BLOCK], places % BLOCK] = False
        return tokens - owed

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.marks[target], self._owed[target] = self.marks[source], self._owed[source]

    def clear(self, blocks: np.ndarray) -> None:
        self.marks[blocks], self._owed[blocks] = 0, False


# --- All states


Key = tuple[int, int]
"""(the block that holds the last token, number of tokens)."""


@dataclass(frozen=True)
class FoundState:
    state: State
    live: bool
    """Whether all of it is of the live weights, though the blocks may hold marks of older ones."""


class States:
    def __init__(self, budget: int) -> None:
        """`budget`: bytes."""
        self._budget, self._bytes = budget, 0
        self._states: OrderedDict[Key, tuple[State, int]] = OrderedDict()
        """The one used last is at the end."""
        self._taken: dict[Key, bool] = {}
        """States that were handed out themselves in this pass, and whether a copy stays."""

    def __len__(self) -> int:
        return len(self._states)

    def take(self, key: Key, marks: np.ndarray, weights: int, moves: bool) -> FoundState | None:
        """The state of exactly these tokens under the weights of their marks, or all under the live ones; None if there is none.

        `marks` [T]: those in the sequence's blocks. `weights`: the live ones. `moves`: whether nobody else may want a state that is kept under this
        very key, so that no copy need stay. Call this for all sequences of a pass, then `hand_over`, and change states only then.
        """
        own = self._states.get(key)
        fits = ""
        if own is not None and key not in self._taken and len(own[0].marks) == len(marks):
            fits = _fits(own[0], marks, weights)
        if own is not None and fits:
            self._taken[key] = not moves
            return FoundState(own[0], fits == "live")
        return self._copy_of_another(marks, weights)

    def hand_over(self) -> None:
        """Lets go of the states that were taken."""
        taken, self._taken = self._taken, {}
        for key, stays in taken.items():
            state, _ = self._states[key]
            self._remove(key)
            if stays:
                self.keep(key, state.copied(len(state.marks)))

    def _copy_of_another(self, marks: np.ndarray, weights: int) -> FoundState | None:
        best: tuple[int, Key, bool] | None = None
        for key, (state, _) in self._states.items():
            longer = len(state.marks) - len(marks)
            if longer < 0 or (longer and not state.can_be_cut) or (best is not None and longer >= best[0]):
                continue
            if fits := _fits(state, marks, weights):
                best = longer, key, fits == "live"
        if best is None:
            return None
        self._states.move_to_end(best[1])
        return FoundState(self._states[best[1]][0].copied(len(marks)), best[2])

    def keep(self, key: Key, state: State) -> None:
        if key in self._states:
            self._remove(key)
        size = state.nbytes
        self._states[key] = state, size
        self._bytes += size

    def shrink(self, running: int) -> None:
        """Forgets the states that were unused for longest, until they fit the budget. `running`: sequences of the pass."""
        most = max(_MOST, 4 * running)
        while len(self._states) > 1 and (self._bytes > self._budget or len(self._states) > most):
            self._remove(next(iter(self._states)))

    def _remove(self, key: Key) -> None:
        self._bytes -= self._states.pop(key)[1]

    def clear(self) -> None:
        self._states.clear()
        self._bytes = 0


def _fits(state: State, marks: np.ndarray, weights: int) -> str:
    """`same`: the state's first tokens have these very marks; `live`: they are the same tokens, all under the live weights; empty: neither."""
    mine = state.marks[: len(marks)]
    if np.array_equal(mine, marks):
        return "same"
    if (mine >> 32 == weights).all() and np.array_equal(mine & 0xFFFFFFFF, marks & 0xFFFFFFFF):
        return "live"
    return ""
