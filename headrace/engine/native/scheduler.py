"""Who waits, who has a row, which blocks are whose, and what the next forward pass does.

    waiting ──admit: a row and blocks are free──▶ prefill in chunks ──▶ decode, one token a pass ──▶ end
       ▲  ╲ follows: somebody computes this prompt already ╱               │
       └──────────── preempt: no block is left; tokens are kept ◀──────────┘

Order is priority, then arrival. Whoever is preempted goes back into the queue where it stood, and computes again what the
prefix cache has lost by then.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from headrace.engine.native.batch import BLOCK
from headrace.engine.native.blocks import Blocks
from headrace.engine.native.lifetimes import Lifetimes
from headrace.engine.native.prefixes import Match, Prefixes
from headrace.engine.native.sequences import Running, Sequence
from headrace.engine.native.served import Served

LOST = "its KV cache had to make room for others before there was a place for it; fork again, or raise engine.kv_gib"


class Scheduler:
    def __init__(self, blocks: Blocks, running: Running, served: Served) -> None:
        self.blocks, self.running = blocks, running
        self.prefixes = Prefixes(blocks)
        self._served = served
        self.lost: list[Sequence] = []
        """Forks whose cache entries had to go before they had a row."""
        self.draining = False
        self.preemptions = self.asked = self.cached = 0
        self._all: dict[str, Sequence] = {}
        self._queue: list[tuple[tuple[int, int], Sequence]] = []
        """A heap by order. Who was cancelled stays in it until its turn comes."""
        self._held_back: list[Sequence] = []
        """While draining: those that have not begun."""
        self._lifetimes = Lifetimes()
        self._copies: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def get(self, request_id: str) -> Sequence | None:
        return self._all.get(request_id)

    def has_work(self) -> bool:
        """False when all there is is held back."""
        return len(self._all) > len(self._held_back)

    # -- waiting ------------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._all[sequence.id] = sequence
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if self.draining and not sequence.begun:
            self._held_back.append(sequence)
        else:
            heapq.heappush(self._queue, (sequence.order, sequence))

    def drain(self) -> None:
        """Nobody who has not begun is admitted any more."""
        self.draining = True
        queue, self._queue = self._queue, []
        for _, sequence in queue:
            if not sequence.gone:
                self._enqueue(sequence)

    def resume(self) -> None:
        self.draining = False
        held_back, self._held_back = self._held_back, []
        for sequence in held_back:
            self._enqueue(sequence)

    def _head(self) -> Sequence | None:
        while self._queue and self._queue[0][1].gone:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    # -- admission ----------------------------------------------------------------------------------------------------------

    def admit(self) -> list[tuple[int, int]]:
        """Lets in whom there is a row and room for. Returns the blocks to be copied (from, to) before the next pass."""
        reserve = self._lifetimes.blocks_to_come(self.running) if self._queue else 0
        while len(self.running) < self.running.slots and (sequence := self._head()):
            match = self._find(sequence)
            if match.awaits is not None:
                heapq.heappop(self._queue)
                match.awaits.followers.append(sequence)
                sequence.leader = match.awaits
                continue
            own = self._lifetimes.expected_blocks(sequence)
            if self._place(sequence, match, reserve + own):
                heapq.heappop(self._queue)
                reserve += own
            elif len(self.running):
                break
            else:
                self._make_room(sequence)
        copies, self._copies = self._copies, []
        self.blocks.release(source for source, _ in copies)
        return copies

    def _find(self, sequence: Sequence) -> Match:
        key = self._served.root(sequence.adapter)
        if (
            sequence.pinned is not None or sequence.scored
        ):  # a prompt whose logits are wanted is not taken from the cache
            return self.prefixes.nothing(key)
        return self.prefixes.find(key, sequence.tokens)

    def _place(self, sequence: Sequence, match: Match, reserve: int) -> bool:
        """Gives it a row and its blocks, unless fewer than `reserve` would be left. Alone, it may have them all."""
        pinned = sequence.pinned
        if pinned is None:
            shared, computed = match.blocks, match.tokens
            copied = [match.tail.block] if match.tail else []
            kv_version = self._served.version(sequence.adapter) if computed else -1
        else:
            shared, computed, kv_version = pinned.blocks[: pinned.whole], pinned.computed, pinned.kv_version
            copied = pinned.blocks[pinned.whole :]
        new = -(-len(sequence.tokens) // BLOCK) - len(shared)
        self.blocks.hold([*shared, *copied])
        if self.blocks.free < new + (reserve if len(self.running) else 0):
            self.blocks.release([*shared, *copied])
            return False
        table = shared + [self.blocks.take() for _ in range(new)]
        self._copies += [(block, table[len(shared)]) for block in copied]
        self.running.add(sequence, table, computed, kv_version, self._served.slot(sequence.adapter))
        sequence.verified = len(shared)
        if pinned is not None:
            self._unpin(sequence)
            if kv_version == self._served.version(sequence.adapter):
                key = self._served.root(sequence.adapter)
                sequence.node = self.prefixes.follow(key, sequence.tokens[:computed], table)
        elif not sequence.scored:
            self._promise(sequence, match, table)
        self._count(sequence, computed)
        return True

    def _promise(self, sequence: Sequence, match: Match, table: list[int]) -> None:
        sequence.promised = self.prefixes.promise(sequence, match, sequence.tokens, table)
        sequence.node = match.node
        for node in sequence.promised:
            if len(node.tokens) == BLOCK:
                sequence.node = node
            else:
                sequence.tail = node

    def _count(self, sequence: Sequence, computed: int) -> None:
        if not sequence.begun:
            self.asked += len(sequence.tokens)
            self.cached += computed

    def _make_room(self, head: Sequence) -> None:
        """Nothing runs, and still the first in the queue does not fit: what it needs is held by forks that wait behind it, or
        is the block that it would copy from. Alone, without either, it fits."""
        if not self._drop_pins(but=head) and not self._drop_pins(but=None):
            self.prefixes.cut()

    def _drop_pins(self, but: Sequence | None) -> bool:
        pinned = [sequence for sequence in self._all.values() if sequence.pinned and sequence is not but]
        if not pinned:
            return False
        last = max(pinned, key=lambda sequence: sequence.order)
        self.lost.append(last)
        self.end(last)
        return True

    def _unpin(self, sequence: Sequence) -> None:
        if sequence.pinned is not None:
            self.blocks.release(sequence.pinned.blocks)
            sequence.pinned = None

    # -- the pass -----------------------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """A block for every row whose last one is full, taken from those lowest in order when none is left."""
        running = self.running
        while True:
            ends = np.flatnonzero(running.column("computed") == running.column("blocks") * BLOCK)
            if len(ends) <= self.blocks.free:
                break
            if len(running) > 1:
                self.preemptions += 1
                self.preempt(max(running.sequences, key=lambda sequence: sequence.order))
            else:
                assert self._drop_pins(None), "one request alone always fits"
        for row in ends.tolist():
            running.append(row, self.blocks.take())

    def preempt(self, sequence: Sequence) -> None:
        """Back into the queue: its blocks are free, its tokens are kept."""
        row = sequence.row
        sequence.tokens = self.running.tokens(row)
        sequence.begun, sequence.scores = True, []
        self._vacate(sequence)
        self._enqueue(sequence)

    def full(self, rows: np.ndarray) -> None:
        """Tells the prefix cache of those whose last block has just been filled (and found finite)."""
        computed = self.running.column("computed")[rows]
        for row in rows[computed % BLOCK == 0].tolist():
            self._cache_block(self.running.sequences[row])

    def _cache_block(self, sequence: Sequence) -> None:
        row, node, tail, sequence.tail = sequence.row, sequence.node, sequence.tail, None
        place = int(self.running.columns["computed"][row]) // BLOCK - 1
        if node is not None and node.alive and node.depth > place:
            return  # promised, and there by now
        sequence.node = None
        if node is None or not node.alive or node.depth < place:
            return
        tokens, block = (
            self.running.tokens(row, place * BLOCK, (place + 1) * BLOCK),
            int(self.running.tables[row, place]),
        )
        other = node.children.get(tokens)
        if tail is not None and tail.alive and other is None:
            tail.rename(tokens)
            sequence.node = tail
            return
        if tail is not None:
            tail.remove(self.blocks)
        if other is None:
            sequence.node = self.prefixes.keep(node, tokens, block)
        elif other.owner is None:  # the same tokens under the same weights: one block for both
            self.blocks.hold([other.block])
            self.running.tables[row, place] = other.block
            self.blocks.release([block])
            sequence.node = other

    def verify(self, sequence: Sequence) -> None:
        """Logits behind all its tokens were finite: what it promised is there, and others may have it."""
        self.running.columns["fresh"][sequence.row] = False
        for node in sequence.promised:
            node.owner = None
        sequence.promised = []
        sequence.verified = self.running.tables.shape[1]
        self._free_followers(sequence)

    def _free_followers(self, sequence: Sequence) -> None:
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            follower.leader = None
            self._enqueue(follower)

    # -- the end ------------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """It has ended by itself."""
        self._lifetimes.record(sequence.request.sampling.max_tokens, int(self.running.columns["counter"][sequence.row]))
        self.end(sequence)

    def end(self, sequence: Sequence, poisoned: bool = False) -> None:
        """Takes it out, wherever it is. `poisoned`: what it computed may hold NaN."""
        del self._all[sequence.id]
        sequence.gone = True
        if poisoned:
            self.blocks.taint(self.running.table(sequence.row))
        if sequence.row >= 0:
            self._vacate(sequence)
        self._unpin(sequence)
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
        if sequence in self._held_back:
            self._held_back.remove(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Gives its row and its blocks back. What nobody has vouched for yet is nobody's."""
        table = self.running.table(sequence.row)
        for node in sequence.promised:
            node.remove(self.blocks)
        sequence.promised = []
        if sequence.verified < len(table):
            self.blocks.taint(table[sequence.verified :])
        else:
            self._cache_rest(sequence, table)
        self.running.remove(sequence.row)
        self.blocks.release(table)
        sequence.node = sequence.tail = None
        sequence.verified = 0
        self._free_followers(sequence)

    def _cache_rest(self, sequence: Sequence, table: list[int]) -> None:
        """The block that is not full: a conversation that goes on needs it."""
        node, tail = sequence.node, sequence.tail
        computed = int(self.running.columns["computed"][sequence.row])
        start = computed - computed % BLOCK
        if node is None or not node.alive or node.depth * BLOCK != start or start == computed:
            return
        tokens = self.running.tokens(sequence.row, start, computed)
        if tail is None or not tail.alive:
            self.prefixes.keep(node, tokens, table[start // BLOCK])
        elif tokens not in node.children:
            tail.rename(tokens)

    # -- swaps --------------------------------------------------------------------------------------------------------------

    def swapped(self, adapter: str | None, recompute: bool) -> None:
        """The base weights (None) or an adapter's are others from now on. Cached prefixes of before are for nobody."""
        self.prefixes.cut(adapter)
        for sequence in list(self._all.values()):
            if sequence.leader is not None:  # what it waits for would be of the weights before
                sequence.leader.followers.remove(sequence)
                sequence.leader = None
                self._enqueue(sequence)
            if adapter is not None and sequence.adapter != adapter:
                continue
            # A version of an adapter does not tell which base weights computed the rest: never keep that. And log-probs of a
            # prompt are all of one version.
            if recompute or (adapter is None and sequence.adapter) or sequence.scored:
                if sequence.row >= 0:
                    self.preempt(sequence)
                elif sequence.pinned is not None:
                    self._unpin(sequence)

    def integrity(self) -> None:
        """Asserts that every request is in exactly one place, and every block accounted for."""
        running = self.running
        assert [sequence.row for sequence in running.sequences] == list(range(len(running))), "rows have no holes"
        places = [
            *(sequence.id for sequence in running.sequences),
            *(sequence.id for _, sequence in self._queue if not sequence.gone),
            *(follower.id for sequence in running.sequences for follower in sequence.followers),
            *(sequence.id for sequence in self._held_back),
        ]
        assert sorted(places) == sorted(self._all), "every request is in exactly one place"
        tables = [running.table(sequence.row) for sequence in running.sequences]
        pins = [sequence.pinned.blocks for sequence in self._all.values() if sequence.pinned]
        self.blocks.integrity(block for blocks in [*tables, *pins] for block in blocks)
        self.prefixes.integrity()
        written = [int(table[row["computed"] // BLOCK]) if row["computed"] < len(table) * BLOCK else -1
                   for table, row in zip(tables, running.columns, strict=False)]  # fmt: skip
        written = [block for block in written if block >= 0]
        assert len(set(written)) == len(written), "no two rows write to one block"
        for table, row in zip(tables, running.columns, strict=False):
            assert row["computed"] < row["known"] <= len(table) * BLOCK + 1, "blocks for all but the token sampled last"
            assert row["counter"] < row["limit"] or row["scored"]
