"""Enters the blocks of running sequences into the prefix cache, and finds cached blocks for new sequences."""

from __future__ import annotations

import numpy as np

from headrace.engine.native.cache.blocks import Blocks
from headrace.engine.native.cache.prefixes import Match, Prefixes
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.schedule.sequences import Running, Sequence
from headrace.engine.native.served import Served


class Sharing:
    def __init__(self, blocks: Blocks, running: Running, served: Served) -> None:
        self._blocks, self._running, self._served = blocks, running, served
        self._prefixes = Prefixes(blocks)

    def find(self, sequence: Sequence) -> Match:
        """Returns the cached prefix of a waiting sequence. It is empty for a prompt whose logits are wanted, and for a fork,
        which has its entries already."""
        root = self._served.root(sequence.adapter)
        if sequence.pinned is not None or sequence.scored:
            return self._prefixes.nothing(root)
        return self._prefixes.find(root, sequence.tokens)

    def promise(self, sequence: Sequence, match: Match, table: list[int]) -> None:
        """Announces the blocks that a sequence with a new row will compute."""
        sequence.promised = self._prefixes.promise(sequence, match, sequence.tokens, table)
        sequence.node = match.node
        for node in sequence.promised:
            if len(node.tokens) == BLOCK:
                sequence.node = node
            else:
                sequence.tail = node

    def follow(self, sequence: Sequence, computed: int, table: list[int]) -> None:
        """A fork has its row: its new blocks are cached too, if those that it continues from are (under the live weights)."""
        sequence.node = self._prefixes.follow(self._served.root(sequence.adapter), sequence.tokens[:computed], table)

    def fulfil(self, sequence: Sequence) -> None:
        for node in sequence.promised:
            node.owner = None
        sequence.promised = []

    def full(self, rows: np.ndarray) -> None:
        """Caches the last blocks of these rows if they have just been filled. Their logits were finite."""
        computed = self._running.columns["computed"][rows]
        for row in rows[computed % BLOCK == 0].tolist():
            self._cache_block(self._running.sequences[row])

    def _cache_block(self, sequence: Sequence) -> None:
        row, node, tail, sequence.tail = sequence.row, sequence.node, sequence.tail, None
        place = int(self._running.columns["computed"][row]) // BLOCK - 1
        if node is not None and node.alive and node.depth > place:
            return  # promised, and there by now
        sequence.node = None
        if node is None or not node.alive or node.depth < place:
            return
        tokens, block = self._running.tokens(row, place * BLOCK, (place + 1) * BLOCK), self._running.table(row)[place]
        other = node.children.get(tokens)
        if tail is not None and tail.alive and other is None:
            tail.rename(tokens)
            sequence.node = tail
            return
        if tail is not None:
            tail.remove(self._blocks)
        if other is None:
            sequence.node = self._prefixes.keep(node, tokens, block)
        elif other.owner is None:  # the same tokens under the same weights: one block for both
            self._blocks.hold([other.block])
            self._running.tables[row, place] = other.block
            self._blocks.release([block])
            sequence.node = other

    def leave(self, sequence: Sequence, table: list[int]) -> None:
        """A sequence gives up its row. Blocks that no finite logits have confirmed leave the cache."""
        for node in sequence.promised:
            node.remove(self._blocks)
        if sequence.verified < len(table):
            self._blocks.taint(table[sequence.verified :])
        else:
            self._cache_rest(sequence, table)
        sequence.promised, sequence.node, sequence.tail = [], None, None

    def _cache_rest(self, sequence: Sequence, table: list[int]) -> None:
        """Caches the last, partly filled block, which the next turn of a conversation needs."""
        node, tail = sequence.node, sequence.tail
        computed = int(self._running.columns["computed"][sequence.row])
        start = computed - computed % BLOCK
        if node is None or not node.alive or node.depth * BLOCK != start or start == computed:
            return
        tokens = self._running.tokens(sequence.row, start, computed)
        if tail is None or not tail.alive:
            self._prefixes.keep(node, tokens, table[start // BLOCK])
        elif tokens not in node.children:
            tail.rename(tokens)

    def cut(self, adapter: str | None = None) -> None:
        """Forgets all entries, or those that one adapter's weights computed."""
        self._prefixes.cut(adapter)

    def integrity(self) -> None:
        """Asserts that the cache agrees with the pool, and the sequences with the blocks that they share."""
        self._prefixes.integrity()
        for sequence in self._running.sequences:
            node, table = sequence.node, self._running.table(sequence.row)
            while node is not None and node.alive and node.parent is not None:
                assert table[node.depth - 1] == node.block, "a sequence holds the blocks that its own are cached behind"
                node = node.parent
