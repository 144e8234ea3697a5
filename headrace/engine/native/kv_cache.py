"""The KV cache: its blocks, the prefixes that they hold, and the experts that each position was routed to."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.core.types import RoutingTrace
from headrace.engine.native.forward_pass import BLOCK

# --- The pool of KV blocks
# Their holders, and the order in which unused ones are given away. No tensor is touched here.
#
#     idle (longest unused first) ──take──▶ held by 1, 2, ... sequences ──release──▶ idle
#
# An idle block keeps its content until it is taken: the prefix cache finds it by its tokens (`kv_cache.py`), a fork by its
# serial number (`scheduler.py`).


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


# --- The prefix cache
# The blocks that hold the keys and values of given tokens under given weights.
#
# A tree of blocks. A node stands for the (up to BLOCK) tokens that follow those of its parent; its key and value entries are
# valid only after that parent. Roots are keyed by the weights, base and adapter, that computed everything below them: so a new
# request never meets entries of older weights, and after a swap the old roots are cut off as a whole.
#
# A sequence *promises* the blocks of its prompt when it is admitted and *fulfils* them when logits have shown that the
# entries are finite. Who comes meanwhile with the same tokens waits for them: a group's prompt is computed once.


Tokens = tuple[int, ...]
Root = tuple[int, str, int]
"""Version of the base weights; name and version of the adapter (empty and 0 without one)."""


class PrefixNode:
    __slots__ = ("_sorted", "block", "children", "depth", "owner", "parent", "root", "tokens")

    def __init__(self, tokens: Tokens, block: int, parent: PrefixNode | None, owner: Any = None) -> None:
        self.tokens, self.block, self.parent, self.owner = tokens, block, parent, owner
        self.root: PrefixNode = parent.root if parent else self
        self.depth: int = parent.depth + 1 if parent else 0
        """Blocks from the beginning, this one included."""
        self.children: dict[Tokens, PrefixNode] = {}
        self._sorted: list[Tokens] = []
        """Keys of `children` in order: the key with the longest common beginning is a neighbour."""

    @property
    def alive(self) -> bool:
        """Reachable still: neither removed, nor of weights that were swapped out."""
        return self.block >= 0 and self.root.block >= 0

    def add(self, tokens: Tokens, block: int, owner: Any = None) -> PrefixNode:
        assert tokens not in self.children
        node = self.children[tokens] = PrefixNode(tokens, block, self, owner)
        insort(self._sorted, tokens)
        return node

    def rename(self, tokens: Tokens) -> None:
        """More of its block is filled."""
        assert self.parent is not None and not self.children and tokens not in self.parent.children
        self._unlist()
        self.tokens = tokens
        self.parent.children[tokens] = self
        insort(self.parent._sorted, tokens)

    def _unlist(self) -> None:
        assert self.parent is not None
        del self.parent.children[self.tokens]
        del self.parent._sorted[bisect_left(self.parent._sorted, self.tokens)]

    def nearest(self, tokens: Tokens) -> tuple[PrefixNode | None, int]:
        """The child that begins with most of `tokens`, and how many of them."""
        place = bisect_left(self._sorted, tokens)
        near = [(_common(key, tokens), key) for key in self._sorted[max(place - 1, 0) : place + 1]]
        shared, key = max(near, default=(0, ()))
        return (self.children[key], shared) if shared else (None, 0)

    def tails(self, tokens: Tokens) -> Iterator[tuple[PrefixNode, int]]:
        """Yields every child that is there and begins as `tokens` do, and how many of them it shares."""
        for key, child in self.children.items():
            if child.owner is None and (shared := _common(key, tokens)):
                yield child, shared

    def remove(self, blocks: Blocks) -> None:
        """Removes the node and all its descendants from the cache."""
        if self.block < 0:
            return
        self._unlist()
        for node in [self, *_below(self)]:
            if blocks.nodes[node.block] is node:
                blocks.nodes[node.block] = None
            node.block = -1


def _common(one: Tokens, other: Tokens) -> int:
    """Length of the beginning that two tuples share."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


@dataclass(frozen=True)
class Match:
    """The cached prefix of a sequence. It never includes the last token, whose logits are needed and which is always forwarded."""

    node: PrefixNode
    """The deepest full block that matches, or the root."""
    blocks: list[int]
    """The full blocks up to it."""
    tail: PrefixNode | None = None
    """A block whose first `shared` tokens are those that follow: to be copied."""
    shared: int = 0
    awaits: Any = None
    """The sequence that is computing the next block; None if none is."""

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.shared

    @property
    def found(self) -> list[int]:
        """All blocks that match, the last one in part where it is to be copied."""
        return [*self.blocks, self.tail.block] if self.tail else self.blocks

    def cut(self, tokens: int) -> Match:
        """Returns the match of the first `tokens` tokens alone, without what is to be copied."""
        node, whole = self.node, tokens // BLOCK
        while node.depth > whole:
            assert node.parent is not None
            node = node.parent
        return Match(node, self.blocks[:whole])


class Prefixes:
    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._roots: dict[Root, PrefixNode] = {}

    def nothing(self, key: Root) -> Match:
        """Returns an empty match."""
        if key not in self._roots:
            self._roots[key] = PrefixNode((), 0, None)
        return Match(self._roots[key], [])

    def find(self, key: Root, tokens: Tokens) -> Match:
        node = self.nothing(key).node
        usable = len(tokens) - 1
        blocks: list[int] = []
        while len(rest := tokens[len(blocks) * BLOCK : min((len(blocks) + 1) * BLOCK, usable)]) == BLOCK:
            child = node.children.get(rest)
            if child is None:
                break
            if child.owner is not None:
                return Match(node, blocks, awaits=child.owner)
            blocks.append(child.block)
            node = child
        tail, shared = node.nearest(rest) if rest else (None, 0)
        if tail is None or tail.owner is None:
            return Match(node, blocks, tail, shared)
        covers = shared == usable - len(blocks) * BLOCK  # else it is not worth waiting for
        return Match(node, blocks, awaits=tail.owner if covers else None)

    def promise(self, owner: Any, match: Match, tokens: Tokens, table: list[int]) -> list[PrefixNode]:
        """Adds nodes after the match for the blocks that `owner` is about to fill, unless they exist already."""
        node, promised = match.node, []
        for place in range(len(match.blocks), len(table)):
            part = tokens[place * BLOCK : (place + 1) * BLOCK]
            if part in node.children:
                break
            node = node.add(part, table[place], owner)
            self._blocks.nodes[table[place]] = node
            promised.append(node)
        return promised

    def keep(self, node: PrefixNode, tokens: Tokens, block: int) -> PrefixNode | None:
        """A node for a block that holds `tokens` by now, or None when one of the same beginning is there already."""
        if node.nearest(tokens)[1] == len(tokens):
            return None
        kept = node.add(tokens, block)
        self._blocks.nodes[block] = kept
        return kept

    def follow(self, key: Root, tokens: Tokens, table: list[int]) -> PrefixNode | None:
        """The node of the last full block of `table`, when the cache knows all of them as these very blocks."""
        node = self._roots.get(key)
        for place in range(len(tokens) // BLOCK):
            node = node.children.get(tokens[place * BLOCK : (place + 1) * BLOCK]) if node else None
            if node is None or node.block != table[place]:
                return None
        return node

    def cut(self, adapter: str | None = None) -> None:
        """Forgets all entries (the base weights were swapped), or those that one adapter's weights computed."""
        for key in [key for key in self._roots if adapter is None or key[1] == adapter]:
            root = self._roots.pop(key)
            root.block = -1
            for node in _below(root):
                if self._blocks.nodes[node.block] is node:
                    self._blocks.forget(node.block)

    def integrity(self) -> None:
        """Asserts that the tree and the pool agree."""
        seen = [node for root in self._roots.values() for node in _below(root)]
        for node in seen:
            assert self._blocks.nodes[node.block] is node and node.alive, "a cached block knows its prefix"
            assert node.parent is not None and node.parent.children[node.tokens] is node
            assert node.parent.parent is None or len(node.parent.tokens) == BLOCK, "nothing lies behind half a block"
            assert sorted(node.children) == node._sorted
        assert sum(node is not None for node in self._blocks.nodes) == len(seen), "no block knows a prefix of the past"


def _below(node: PrefixNode) -> Iterator[PrefixNode]:
    stack = list(node.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


# --- The experts that each position in the KV cache was routed to
# The experts that each position in the KV cache was routed to, stored in blocks like those of the cache.


class RecordedRouting:
    def __init__(self, blocks: int, layers: int, k: int) -> None:
        self._shape = (blocks, BLOCK, layers, k)
        self._experts: np.ndarray | None = None
        """Made when the first pass shows how wide an expert's number is."""

    def record(self, places: np.ndarray, chosen: np.ndarray) -> None:
        """`places` [N, 2]: block and place in it of each token; `chosen` [N, layers, K]."""
        if self._experts is None:
            self._experts = np.zeros(self._shape, dtype=chosen.dtype)
        self._experts[places[:, 0], places[:, 1]] = chosen

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
