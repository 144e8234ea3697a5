"""The scheduler assigns rows and blocks to sequences, and decides the content of the next forward pass.

    waiting ──admit: a row and blocks are free──▶ prefill in chunks ──▶ decode, one token a pass ──▶ end
       ▲  ╲ follows: another sequence computes this prompt ╱               │
       └──────────── preempt: no block is left; tokens are kept ◀──────────┘

Order is priority, then arrival. A preempted sequence returns to its place in the queue, and computes again the entries that
the prefix cache has lost by then.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headrace.core.types import Fork
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.kv_cache import Blocks, Match, Prefixes
from headrace.engine.native.live_weights import Served
from headrace.engine.native.sequences import EngineSequence, Pinned, Plan, Running
from headrace.engine.native.state_slots import StateSlots

# --- The sequences that wait for a row: by priority, then in order of arrival.


class Queue:
    def __init__(self) -> None:
        self.draining = False
        self._heap: list[tuple[tuple[int, int], EngineSequence]] = []
        """A cancelled sequence stays in the heap until it reaches the top."""
        self.held_back: list[EngineSequence] = []
        """Sequences that have not begun, while draining."""

    def push(self, sequence: EngineSequence) -> None:
        if self.draining and not sequence.begun:
            self.held_back.append(sequence)
        else:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> EngineSequence | None:
        while self._heap and self._heap[0][1].gone:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def drain(self) -> None:
        """Holds back all sequences that have not begun."""
        self.draining = True
        heap, self._heap = self._heap, []
        for _, sequence in heap:
            if not sequence.gone:
                self.push(sequence)

    def resume(self) -> None:
        self.draining = False
        held_back, self.held_back = self.held_back, []
        for sequence in held_back:
            self.push(sequence)

    def leave(self, sequence: EngineSequence) -> None:
        """Called when a waiting sequence was removed."""
        if sequence in self.held_back:
            self.held_back.remove(sequence)

    def __iter__(self) -> Iterator[EngineSequence]:
        yield from (sequence for _, sequence in self._heap if not sequence.gone)
        yield from self.held_back


# --- Estimates the lengths of completions
# Estimates the lengths of completions, and from them the number of blocks that the running sequences will need.
#
# Admitting by what is free now would let in sequences that soon push each other out again (each time for the price of
# computing everything anew); admitting by max_tokens leaves most of the cache empty where completions are much shorter. So the
# peak of what is to come is estimated, as LightLLM does (Gong et al., Past-Future Scheduler, ASPLOS 2025): sequences that end
# early free their blocks before others need theirs.


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

    def peak(self, running: Running, own: np.ndarray, candidate: EngineSequence, new: int) -> float:
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


# --- Enters the blocks of running sequences into the prefix cache
# Enters the blocks of running sequences into the prefix cache, and finds cached blocks for new sequences.


class Sharing:
    def __init__(self, blocks: Blocks, running: Running, served: Served, states: StateSlots) -> None:
        self._blocks, self._running, self._served, self._states = blocks, running, served, states
        self._prefixes = Prefixes(blocks)

    def find(self, sequence: EngineSequence) -> Match:
        """Returns the cached prefix of a waiting sequence. It is empty for a prompt whose logits are wanted, and for a fork,
        which has its entries already."""
        root = self._served.root(sequence.adapter)
        if sequence.pinned is not None or sequence.scored:
            return self._prefixes.nothing(root)
        match = self._prefixes.find(root, sequence.tokens)
        return match if match.awaits is not None else self._with_state(match, sequence.tokens[:-1])

    def _with_state(self, match: Match, tokens: tuple[int, ...]) -> Match:
        """Several blocks may begin with what follows the full ones: that of the longest state is chosen, if there is one."""
        rest = tokens[len(match.blocks) * BLOCK :][:BLOCK]
        tails = match.node.tails(rest) if self._states.count and rest else ()
        states = [(self._states.within(tail.block, shared), tail) for tail, shared in tails]
        seen, tail = max(states, key=lambda found: found[0], default=(0, None))
        return replace(match, tail=tail, shared=seen) if seen else match

    def promise(self, sequence: EngineSequence, match: Match, table: list[int]) -> None:
        """Announces the blocks that a sequence with a new row will compute."""
        sequence.promised = self._prefixes.promise(sequence, match, sequence.tokens, table)
        sequence.node = match.node
        for node in sequence.promised:
            if len(node.tokens) == BLOCK:
                sequence.node = node
            else:
                sequence.tail = node

    def follow(self, sequence: EngineSequence, computed: int, table: list[int]) -> None:
        """A fork has its row: its new blocks are cached too, if those that it continues from are (under the live weights)."""
        sequence.node = self._prefixes.follow(self._served.root(sequence.adapter), sequence.tokens[:computed], table)

    def fulfil(self, sequence: EngineSequence) -> None:
        for node in sequence.promised:
            node.owner = None
        sequence.promised = []

    def full(self, rows: np.ndarray) -> None:
        """Caches the last blocks of these rows if they have just been filled. Their logits were finite."""
        computed = self._running.columns["computed"][rows]
        for row in rows[computed % BLOCK == 0].tolist():
            self._cache_block(self._running.sequences[row])

    def _cache_block(self, sequence: EngineSequence) -> None:
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

    def leave(self, sequence: EngineSequence, table: list[int]) -> None:
        """A sequence gives up its row. Blocks that no finite logits have confirmed leave the cache."""
        for node in sequence.promised:
            node.remove(self._blocks)
        if sequence.verified < len(table):
            self._blocks.taint(table[sequence.verified :])
        else:
            self._cache_rest(sequence, table)
        sequence.promised, sequence.node, sequence.tail = [], None, None

    def _cache_rest(self, sequence: EngineSequence, table: list[int]) -> None:
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


# --- scheduler ------------------------------------------------------------


LOST = "its KV cache had to make room for others before there was a place for it; fork again, or raise engine.kv_gib"


class Scheduler:
    def __init__(self, blocks: Blocks, running: Running, served: Served, states: int = 0) -> None:
        """`states`: slots of states, 0 for a model without; else no fewer than rows."""
        self.blocks, self.running = blocks, running
        self.states = StateSlots(states, blocks)
        self.queue, self.sharing = Queue(), Sharing(blocks, running, served, self.states)
        self._served = served
        self.lost: list[EngineSequence] = []
        """Forks whose cache entries had to go before they had a row."""
        self.preemptions = self.asked = self.cached = 0
        self._all: dict[str, EngineSequence] = {}
        self._lifetimes = Lifetimes()
        self._copies: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(self._all.values())

    def get(self, request_id: str) -> EngineSequence | None:
        return self._all.get(request_id)

    def has_work(self) -> bool:
        """False when all there is is held back."""
        return len(self._all) > len(self.queue.held_back)

    # -- waiting ------------------------------------------------------------------------------------------------------------

    def add(self, sequence: EngineSequence) -> None:
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

    def _place(self, sequence: EngineSequence, match: Match) -> bool:
        """Gives it a row and its blocks, unless those that run are expected to need them. Alone, it may have them all."""
        pinned = sequence.pinned
        if pinned is None:
            found, there, kv_version = match.found, match.tokens, self._served.version(sequence.adapter)
        else:
            found, there, kv_version = pinned.blocks, pinned.computed, pinned.kv_version
        computed = self.states.nearest(found, there)
        whole = computed // BLOCK
        shared, copied = found[:whole], found[whole : -(-computed // BLOCK)]
        new = -(-len(sequence.tokens) // BLOCK) - len(shared)
        serials = [self.blocks.serials[block] for block in found]
        self.blocks.hold([*shared, *copied])
        if self.blocks.free < self._needed(sequence, new):
            self.blocks.release([*shared, *copied])
            return False
        table = shared + [self.blocks.take() for _ in range(new)]
        self._copies += [(block, table[len(shared)]) for block in copied]
        self.running.add(
            sequence,
            table,
            computed,
            kv_version=kv_version if computed else -1,
            adapter=self._served.slot(sequence.adapter),
            state=self.states.start(found, computed),
        )
        sequence.verified, sequence.again = len(shared), there
        if pinned is not None:
            self._unpin(sequence)
            if kv_version == self._served.version(sequence.adapter):
                self.sharing.follow(sequence, computed, table)
        elif not sequence.scored:
            self.sharing.promise(sequence, match.cut(computed), table)
            self._keep_states(sequence, list(zip(found, serials, strict=True)), there, table)
        self._count(sequence, computed)
        return True

    def _keep_states(
        self, sequence: EngineSequence, cached: list[tuple[int, int]], there: int, table: list[int]
    ) -> None:
        """Notes where states are to be kept on its way: before the last token of its prompt, where siblings begin, and where it parts from a cached prefix
        at the end of a block, as others may. `cached`: blocks, and their serial numbers, of its first `there` tokens: others find these."""
        if not self.states.count or sequence.begun:
            return
        end, computed = len(sequence.tokens) - 1, int(self.running.columns["computed"][sequence.row])
        own = [(block, self.blocks.serials[block]) for block in table]
        places = {there // BLOCK * BLOCK: cached, end: cached if there == end else own}
        sequence.keeps = [(at, *blocks[(at - 1) // BLOCK]) for at, blocks in places.items() if at > computed]

    def kept(self, plan: Plan) -> np.ndarray | None:
        """Returns `ForwardInput.kept` of a pass."""
        found: dict[int, tuple[int, int, int]] = {}
        """The states to keep, by slot: where few are free, one may take that of another in the same pass."""
        for segment, chunk in enumerate(plan.chunks, len(plan.decoding)):
            for tokens, block, serial in self.running.sequences[chunk.row].keeps:
                if chunk.start < tokens <= chunk.stop:
                    slot = self.states.keep(block, serial, (tokens - 1) % BLOCK + 1)
                    found[slot] = segment, tokens, slot
        found.pop(-1, None)
        return np.array(list(found.values()), dtype=np.int32) if found else None

    def _needed(self, sequence: EngineSequence, new: int) -> float:
        """Blocks that must be free for it to be let in."""
        running = self.running
        if not len(running):
            return new
        tables = running.tables[: len(running)]
        if self.blocks.free >= new + tables.size:
            return new  # whatever comes
        own = self.blocks.own(tables, running.column("blocks"))
        return self._lifetimes.peak(running, own, sequence, new)

    def _count(self, sequence: EngineSequence, computed: int) -> None:
        if not sequence.begun:
            self.asked += len(sequence.tokens)
            self.cached += computed

    def _make_room(self, head: EngineSequence) -> None:
        """Called if nothing runs and the first in the queue still does not fit: forks that wait after it hold the blocks, or
        the block that it would copy from does. Without these it fits."""
        if not self._drop_pins(but=head) and not self._drop_pins(but=None):
            self.sharing.cut()

    def _drop_pins(self, but: EngineSequence | None) -> bool:
        pinned = [sequence for sequence in self._all.values() if sequence.pinned and sequence is not but]
        if not pinned:
            return False
        last = max(pinned, key=lambda sequence: sequence.order)
        self.lost.append(last)
        self.end(last)
        return True

    def _unpin(self, sequence: EngineSequence) -> None:
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

    def preempt(self, sequence: EngineSequence) -> None:
        """Back into the queue: its blocks are free, its tokens are kept."""
        row = sequence.row
        sequence.tokens = self.running.tokens(row)
        sequence.begun, sequence.scores = True, []
        self._vacate(sequence)
        self.queue.push(sequence)

    def verify(self, sequence: EngineSequence) -> None:
        """The logits after all its tokens were finite: the blocks that it promised are filled, and others may use them."""
        self.running.columns["fresh"][sequence.row] = False
        self.sharing.fulfil(sequence)
        sequence.verified = self.running.tables.shape[1]
        self._free_followers(sequence)

    def _free_followers(self, sequence: EngineSequence) -> None:
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            follower.leader = None
            self.queue.push(follower)

    # -- the end ------------------------------------------------------------------------------------------------------------

    def finish(self, sequence: EngineSequence) -> None:
        """Notes the end of a sequence that has ended by itself."""
        self._lifetimes.record(sequence.request.sampling.max_tokens, int(self.running.columns["counter"][sequence.row]))
        self.end(sequence)

    def end(self, sequence: EngineSequence, poisoned: bool = False) -> None:
        """Removes a sequence, running or waiting. `poisoned`: its entries may hold NaN."""
        del self._all[sequence.id]
        sequence.gone = True
        if poisoned:
            self.blocks.taint(self.running.table(sequence.row))
            sequence.verified = 0
        if sequence.row >= 0:
            self._vacate(sequence)
        self._unpin(sequence)
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
        self.queue.leave(sequence)

    def _vacate(self, sequence: EngineSequence) -> None:
        """Gives its row and its blocks back."""
        table, columns = self.running.table(sequence.row), self.running.columns[sequence.row]
        finite = sequence.verified >= len(table)
        self.states.leave(int(columns["state"]), table, int(columns["computed"]) if finite else 0)
        sequence.keeps = []
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
            sequence.keeps = []  # they would be kept for blocks of the earlier weights
            # An adapter's version does not identify the base weights under it: never keep such entries. And log-probs of a
            # prompt are all of one version.
            if recompute or (adapter is None and sequence.adapter) or sequence.scored:
                if sequence.row >= 0:
                    self.preempt(sequence)
                elif sequence.pinned is not None:
                    self._unpin(sequence)

    def _unfollow(self, sequence: EngineSequence) -> None:
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
            self.queue.push(sequence)

    def fall_asleep(self, keep: bool) -> None:
        """The cache goes. `keep`: the blocks that sequences hold will be there again; else running sequences compute theirs anew. So do those of a model
        with states, which are not taken along."""
        keep = keep and not self.states.count
        self.sharing.cut()
        for sequence in list(self._all.values()):
            self._unfollow(sequence)
            if keep:
                continue
            if sequence.row >= 0:
                self.preempt(sequence)
            else:
                self._unpin(sequence)
        self.states.clear()
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
        self.states.integrity(slot for slot in running.column("state").tolist() if slot >= 0)
        self.sharing.integrity()
        written = [int(table[row["computed"] // BLOCK]) if row["computed"] < len(table) * BLOCK else -1
                   for table, row in zip(tables, running.columns, strict=False)]  # fmt: skip
        written = [block for block in written if block >= 0]
        assert len(set(written)) == len(written), "no two rows write to one block"
        for table, row in zip(tables, running.columns, strict=False):
            assert row["computed"] < row["known"] <= len(table) * BLOCK + 1, "blocks for all but the token sampled last"
            assert row["counter"] < row["limit"] or row["scored"]


# --- Forks: sequences that continue from an earlier token of another sequence
# Forks: sequences that continue from an earlier token of another sequence, using the cache entries that it left.
#
# No block is held for possible forks: a finished sequence is remembered with the serial numbers of its blocks, and a fork checks
# that these have not changed.


REMEMBERED = 1024
"""Finished sequences."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The sequence state from which a fork continues."""

    tokens: tuple[int, ...]
    prompt: int
    adapter: str
    computed: int
    blocks: list[int]
    serials: list[int]
    kv_version: int


class Forks:
    def __init__(self, schedule: Scheduler, running: Running, blocks: Blocks) -> None:
        self._schedule, self._running, self._blocks = schedule, running, blocks
        self._past: OrderedDict[str, Past] = OrderedDict()

    def remember(self, sequence: EngineSequence) -> None:
        """Called while it still has its row."""
        self._past.pop(sequence.id, None)
        self._past[sequence.id] = self._look(sequence)
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)

    def forget(self, adapter: str | None) -> None:
        """Forgets the sequences with this adapter (it is unloaded), or with any (the base weights were swapped): the adapter's
        version no longer identifies the weights that computed their entries."""
        for name in [name for name, past in self._past.items() if past.adapter and adapter in (None, past.adapter)]:
            del self._past[name]

    def _look(self, sequence: EngineSequence) -> Past:
        row, table = sequence.row, self._running.table(sequence.row)
        columns = self._running.columns[row]
        return Past(
            tokens=self._running.tokens(row),
            prompt=sequence.prompt,
            adapter=sequence.adapter,
            computed=int(columns["computed"]),
            blocks=table,
            serials=[self._blocks.serials[block] for block in table],
            kv_version=int(columns["kv_version"]),
        )

    def source(self, fork: Fork) -> Past:
        """Raises ValueError if there is no sequence to continue from."""
        sequence = self._schedule.get(fork.of)
        if sequence is not None and sequence.row < 0:
            raise ValueError(f"request {fork.of} has no KV cache now: it waits for room; fork it once it runs")
        past = self._look(sequence) if sequence else self._past.get(fork.of)
        if past is None:
            raise ValueError(
                f"request {fork.of} is not known (or ended long ago); give its tokens as the prompt of a new request"
            )
        there = len(past.tokens) - past.prompt
        if not 0 <= fork.at_token <= there:
            raise ValueError(
                f"request {fork.of} cannot be forked at token {fork.at_token}: it has sampled {there}; choose 0 to {there}"
            )
        return past

    def pin(self, fork: Fork, past: Past) -> Pinned:
        """Holds the blocks that the fork continues from. Raises ValueError if they no longer exist, or not yet."""
        needed = past.prompt + fork.at_token - 1  # the last token is forwarded again, for its logits
        blocks = past.blocks[: -(-needed // BLOCK)]
        if needed > past.computed:
            raise ValueError(f"request {fork.of} has not computed that far yet; fork it once it samples")
        if [self._blocks.serials[block] for block in blocks] != past.serials[: len(blocks)]:
            raise ValueError(
                f"the KV cache of request {fork.of} has made room for others; give its tokens as the prompt of a new request "
                "(which computes them anew), or raise engine.kv_gib"
            )
        source = self._schedule.get(fork.of)
        if source is not None and needed == past.computed:
            self._schedule.states.keep_copy(int(self._running.columns["state"][source.row]), blocks, needed)
        self._blocks.hold(blocks)
        return Pinned(blocks, needed, past.kv_version if needed else -1)
