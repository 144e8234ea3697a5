"""The scheduler assigns rows and blocks to sequences, and decides the content of the next forward pass.

    waiting ──admit: a row and blocks are free──▶ prefill in chunks ──▶ decode, one token a pass ──▶ end
       ▲  ╲ follows: another sequence computes this prompt ╱               │
       └──────────── preempt: no block is left; tokens are kept ◀──────────┘

Order is priority, then arrival. A preempted sequence returns to its place in the queue, and computes again the entries that
the prefix cache has lost by then.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.engine.native.cache.blocks import Blocks
from headrace.engine.native.cache.prefixes import Match
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.schedule.lifetimes import Lifetimes
from headrace.engine.native.schedule.sequences import Running, Sequence
from headrace.engine.native.schedule.sharing import Sharing
from headrace.engine.native.schedule.waiting import Queue
from headrace.engine.native.served import Served

LOST = "its KV cache had to make room for others before there was a place for it; fork again, or raise engine.kv_gib"


class Scheduler:
    def __init__(self, blocks: Blocks, running: Running, served: Served) -> None:
        self.blocks, self.running = blocks, running
        self.queue, self.sharing = Queue(), Sharing(blocks, running, served)
        self._served = served
        self.lost: list[Sequence] = []
        """Forks whose cache entries had to go before they had a row."""
        self.preemptions = self.asked = self.cached = 0
        self._all: dict[str, Sequence] = {}
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
        return len(self._all) > len(self.queue.held_back)

    # -- waiting ------------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._all[sequence.id] = sequence
        self.queue.push(sequence)

    # -- admission ----------------------------------------------------------------------------------------------------------

    def admit(self) -> list[tuple[int, int]]:
        """Lets in whom there is a row and room for. Returns the blocks to be copied (from, to) before the next pass."""
        if len(self.running) == self.running.slots or self.queue.head() is None:
            return []
        while len(self.running) < self.running.slots and (sequence := self.queue.head()):
            match = self.sharing.find(sequence)
            if match.awaits is not None:
                self.queue.pop()
                match.awaits.followers.append(sequence)
                sequence.leader = match.awaits
                continue
            if self._place(sequence, match):
                self.queue.pop()
            elif len(self.running):
                break
            else:
                self._make_room(sequence)
        copies, self._copies = self._copies, []
        self.blocks.release(source for source, _ in copies)
        return copies

    def _place(self, sequence: Sequence, match: Match) -> bool:
        """Gives it a row and its blocks, unless those that run are expected to need them. Alone, it may have them all."""
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
        if self.blocks.free < self._needed(sequence, new):
            self.blocks.release([*shared, *copied])
            return False
        table = shared + [self.blocks.take() for _ in range(new)]
        self._copies += [(block, table[len(shared)]) for block in copied]
        self.running.add(sequence, table, computed, kv_version, self._served.slot(sequence.adapter))
        sequence.verified = len(shared)
        if pinned is not None:
            self._unpin(sequence)
            if kv_version == self._served.version(sequence.adapter):
                self.sharing.follow(sequence, computed, table)
        elif not sequence.scored:
            self.sharing.promise(sequence, match, table)
        self._count(sequence, computed)
        return True

    def _needed(self, sequence: Sequence, new: int) -> float:
        """Blocks that must be free for it to be let in."""
        running = self.running
        if not len(running):
            return new
        tables = running.tables[: len(running)]
        if self.blocks.free >= new + tables.size:
            return new  # whatever comes
        own = self.blocks.own(tables, running.column("blocks"))
        return self._lifetimes.peak(running, own, sequence, new)

    def _count(self, sequence: Sequence, computed: int) -> None:
        if not sequence.begun:
            self.asked += len(sequence.tokens)
            self.cached += computed

    def _make_room(self, head: Sequence) -> None:
        """Called if nothing runs and the first in the queue still does not fit: forks that wait after it hold the blocks, or
        the block that it would copy from does. Without these it fits."""
        if not self._drop_pins(but=head) and not self._drop_pins(but=None):
            self.sharing.cut()

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
        self.queue.push(sequence)

    def verify(self, sequence: Sequence) -> None:
        """The logits after all its tokens were finite: the blocks that it promised are filled, and others may use them."""
        self.running.columns["fresh"][sequence.row] = False
        self.sharing.fulfil(sequence)
        sequence.verified = self.running.tables.shape[1]
        self._free_followers(sequence)

    def _free_followers(self, sequence: Sequence) -> None:
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            follower.leader = None
            self.queue.push(follower)

    # -- the end ------------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """It has ended by itself."""
        self._lifetimes.record(sequence.request.sampling.max_tokens, int(self.running.columns["counter"][sequence.row]))
        self.end(sequence)

    def end(self, sequence: Sequence, poisoned: bool = False) -> None:
        """Removes a sequence, running or waiting. `poisoned`: its entries may hold NaN."""
        del self._all[sequence.id]
        sequence.gone = True
        if poisoned:
            self.blocks.taint(self.running.table(sequence.row))
        if sequence.row >= 0:
            self._vacate(sequence)
        self._unpin(sequence)
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
        self.queue.leave(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Gives its row and its blocks back."""
        table = self.running.table(sequence.row)
        self.sharing.leave(sequence, table)
        self.running.remove(sequence.row)
        self.blocks.release(table)
        sequence.verified = 0
        self._free_followers(sequence)

    # -- swaps --------------------------------------------------------------------------------------------------------------

    def swapped(self, adapter: str | None, recompute: bool) -> None:
        """The base weights (None) or an adapter's were replaced. Earlier cached prefixes are not used any more."""
        self.sharing.cut(adapter)
        for sequence in list(self._all.values()):
            self._unfollow(sequence)  # the prefix that it waits for would be of the earlier weights
            if adapter is not None and sequence.adapter != adapter:
                continue
            # An adapter's version does not identify the base weights under it: never keep such entries. And log-probs of a
            # prompt are all of one version.
            if recompute or (adapter is None and sequence.adapter) or sequence.scored:
                if sequence.row >= 0:
                    self.preempt(sequence)
                elif sequence.pinned is not None:
                    self._unpin(sequence)

    def _unfollow(self, sequence: Sequence) -> None:
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
            self.queue.push(sequence)

    def fall_asleep(self, keep: bool) -> None:
        """The cache goes. `keep`: the blocks that sequences hold will be there again; else running sequences compute theirs anew."""
        self.sharing.cut()
        for sequence in list(self._all.values()):
            self._unfollow(sequence)
            if keep:
                continue
            if sequence.row >= 0:
                self.preempt(sequence)
            else:
                self._unpin(sequence)
        self.blocks.lose_idle()

    def integrity(self) -> None:
        """Asserts that every request is in exactly one place, and every block accounted for."""
        running = self.running
        assert [sequence.row for sequence in running.sequences] == list(range(len(running))), "rows have no holes"
        places = [
            *(sequence.id for sequence in running.sequences),
            *(sequence.id for sequence in self.queue),
            *(follower.id for sequence in running.sequences for follower in sequence.followers),
        ]
        assert sorted(places) == sorted(self._all), "every request is in exactly one place"
        tables = [running.table(sequence.row) for sequence in running.sequences]
        pins = [sequence.pinned.blocks for sequence in self._all.values() if sequence.pinned]
        self.blocks.integrity(block for blocks in [*tables, *pins] for block in blocks)
        self.sharing.integrity()
        written = [int(table[row["computed"] // BLOCK]) if row["computed"] < len(table) * BLOCK else -1
                   for table, row in zip(tables, running.columns, strict=False)]  # fmt: skip
        written = [block for block in written if block >= 0]
        assert len(set(written)) == len(written), "no two rows write to one block"
        for table, row in zip(tables, running.columns, strict=False):
            assert row["computed"] < row["known"] <= len(table) * BLOCK + 1, "blocks for all but the token sampled last"
            assert row["counter"] < row["limit"] or row["scored"]
