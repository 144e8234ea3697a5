"""The pool of KV blocks: their holders, and the order in which unused ones are given away. No tensor is touched here.

    idle (longest unused first) ──take──▶ held by 1, 2, ... sequences ──release──▶ idle

An idle block keeps its content until it is taken: the prefix cache finds it by its tokens (`prefixes.py`), a fork by its
serial number (`forks.py`).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Cached(Protocol):
    """A node of the prefix cache, for which a block is kept."""

    block: int

    def remove(self, blocks: Blocks) -> None: ...


class Blocks:
    def __init__(self, count: int) -> None:
        self.count = count
        self.serials = [0] * count
        """The number of times that each block was taken or cleared: shows whether a remembered block has been given away since."""
        self.nodes: list[Cached | None] = [None] * count
        """The prefix that a block is cached for."""
        self._holders = array("i", bytes(4 * count))
        self._view = np.frombuffer(self._holders, dtype=np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._tainted: set[int] = set()
        self._dirty: list[int] = []

    @property
    def free(self) -> int:
        """The number of blocks without a holder."""
        return len(self._idle)

    @property
    def held(self) -> int:
        return self.count - len(self._idle)

    def in_use(self) -> np.ndarray:
        """Returns the numbers of the blocks that have a holder, ascending."""
        return np.flatnonzero(self._view)

    def lose_idle(self) -> None:
        """The content of blocks without a holder is gone: no fork continues from them."""
        for block in self._idle:
            self.serials[block] += 1

    def own(self, tables: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns [S]: how many blocks of each table [S, W], of which `lengths` are in use, have no other holder."""
        used = np.arange(tables.shape[1]) < lengths[:, None]
        return ((self._view[tables] == 1) & used).sum(-1)

    def take(self) -> int:
        """Takes the block that was unused for longest, and removes its prefix from the cache."""
        assert self._idle, "whoever takes looks at `free` first"
        block, _ = self._idle.popitem(last=False)
        if (node := self.nodes[block]) is not None:
            node.remove(self)
        self.serials[block] += 1
        self._holders[block] = 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Last ones first: of one sequence's blocks, the first are the likelier to be asked for again."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[block] = None
                if block in self._tainted:
                    self._tainted.remove(block)
                    self._dirty.append(block)
                    self.serials[block] += 1  # nothing is left to remember
                if self.nodes[block] is None:  # worth nothing to the prefix cache
                    self._idle.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """The block's prefix is worth nothing any more. It is taken next: its memory is there and in a cache, that of blocks which
        were never used must be given by the system first, page by page."""
        self.nodes[block] = None
        if block in self._idle:
            self._idle.move_to_end(block, last=False)

    def taint(self, blocks: Iterable[int]) -> None:
        """Marks a block that may hold NaN: it leaves the cache, with all that follows it, and is cleared when its last holder
        releases it."""
        for block in blocks:
            self._tainted.add(block)
            if (node := self.nodes[block]) is not None:
                node.remove(self)

    def dirty(self) -> list[int]:
        """Returns the blocks to clear before the next pass, each once."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def integrity(self, holders: Iterable[int]) -> None:
        """Asserts exact accounting, given every held block (as often as it is held)."""
        counted = Counter(holders)
        assert counted == {block: n for block, n in enumerate(self._holders) if n}, "held as often as it is referred to"
        assert not self._idle.keys() & counted.keys(), "no block is idle and held"
        assert len(self._idle) + len(counted) == self.count, "every block is idle or held"
        assert self._tainted <= counted.keys(), "a tainted block is held by somebody"
        for block, node in enumerate(self.nodes):
            assert node is None or node.block == block, "a block and its prefix know each other"
