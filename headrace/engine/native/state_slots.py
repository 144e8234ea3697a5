"""Slots for the states that sequences keep beside their blocks, where layers follow a recurrence: who has one, and which are kept for others.

A state is of fixed size, changes with every token, and cannot be cut. So each running sequence has a slot, whose state has seen the tokens that are in
its blocks; and copies are kept where others may want to go on: before the last token of a prompt, where siblings begin; where a prompt parts from one
that is cached; where a sequence has ended or was preempted, or is forked. A kept state belongs to the block that holds its last token, and says how many tokens
of that block it has seen: whoever finds the block finds the state, of the same tokens and weights, and a block that is given away takes its states with it.

    free ──start──▶ a row's ──leave──▶ kept (longest unused first) ──▶ free, or another's
         ──keep───────────────────────▶

No tensor is touched here: copies are listed, and made in their order before the next pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.kv_cache import Blocks

Key = tuple[int, int, int]
"""The block of a state's last token, its serial number, and the number of the block's tokens that the state has seen."""


class StateSlots:
    def __init__(self, count: int, blocks: Blocks) -> None:
        """`count`: 0 for a model without states, for which all of this does nothing; else no fewer than rows."""
        self.count, self._blocks = count, blocks
        self._free = list(range(count))
        self._kept: OrderedDict[Key, int] = OrderedDict()
        self._seen: dict[tuple[int, int], set[int]] = {}
        """The last parts of the keys, by the first two."""
        self._copies: list[tuple[int, int]] = []

    def nearest(self, blocks: Sequence[int], tokens: int) -> int:
        """Returns the number of a sequence's first tokens, `tokens` at most, whose state is kept; `tokens` itself without states. `blocks`: those that hold
        them."""
        if not self.count:
            return tokens
        for place in range(-(-tokens // BLOCK) - 1, -1, -1):
            if found := self.within(blocks[place], tokens - place * BLOCK):
                return place * BLOCK + found
        return 0

    def within(self, block: int, tokens: int) -> int:
        """Returns the number of a block's first tokens, `tokens` at most, of which the last has its state kept; 0 if none has."""
        seen = self._seen.get((block, self._blocks.serials[block]), ())
        return max((count for count in seen if count <= tokens), default=0)

    def start(self, blocks: Sequence[int], tokens: int) -> int:
        """Returns the slot of a sequence that goes on from its first `tokens` tokens, which `nearest` found in `blocks`; -1 without states."""
        if not self.count:
            return -1
        source = -1
        if tokens:
            key = self._key(blocks, tokens)
            self._kept.move_to_end(key)
            source = self._kept[key]
        slot = self._take()
        assert slot >= 0, "there are no fewer slots than rows"
        self._copy(source, slot)
        return slot

    def keep(self, block: int, serial: int, seen: int) -> int:
        """Returns a slot for the state after `seen` tokens of a block, which the next pass puts there; -1 if there is none, or no use for one."""
        key = (block, serial, seen)
        if not self.count or key in self._kept or self._blocks.serials[block] != serial:
            return -1
        if (slot := self._take()) >= 0:
            self._put(key, slot)
        return slot

    def keep_copy(self, slot: int, blocks: Sequence[int], tokens: int) -> None:
        """Keeps the state in a row's slot, which has seen `tokens` tokens, as it is now."""
        if tokens:
            self._copy(slot, self.keep(*self._key(blocks, tokens)))

    def leave(self, slot: int, blocks: Sequence[int], tokens: int) -> None:
        """A sequence gives up its slot. `tokens`: those that its state has seen; 0 if nobody shall go on from it."""
        if slot < 0:
            return
        key = self._key(blocks, tokens) if tokens else None
        if key is None or key in self._kept:
            self._free.append(slot)
        else:
            self._put(key, slot)

    def copies(self) -> list[tuple[int, int]]:
        """Returns the copies (from, to) to be made now, one after the other."""
        copies, self._copies = self._copies, []
        return copies

    def clear(self) -> None:
        """All states are gone. No row has a slot."""
        self._free = list(range(self.count))
        self._kept.clear()
        self._seen.clear()
        self._copies.clear()

    def _key(self, blocks: Sequence[int], tokens: int) -> Key:
        block = blocks[(tokens - 1) // BLOCK]
        return block, self._blocks.serials[block], (tokens - 1) % BLOCK + 1

    def _copy(self, source: int, target: int) -> None:
        if source >= 0 and target >= 0 and source != target:
            self._copies.append((source, target))

    def _put(self, key: Key, slot: int) -> None:
        self._kept[key] = slot
        self._seen.setdefault(key[:2], set()).add(key[2])

    def _take(self) -> int:
        """A slot that is free, or else that of a kept state: of a block that was given away, or the one unused for longest. -1 if rows have all."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return -1
        lost = (key for key in self._kept if self._blocks.serials[key[0]] != key[1])
        key = next(lost, next(iter(self._kept)))
        seen = self._seen[key[:2]]
        seen.remove(key[2])
        if not seen:
            del self._seen[key[:2]]
        return self._kept.pop(key)

    def integrity(self, held: Iterable[int]) -> None:
        """Asserts that every slot is a row's, kept, or free. `held`: those of rows."""
        everyone = sorted([*held, *self._kept.values(), *self._free])
        assert everyone == list(range(self.count)), "every slot is in exactly one place"
        found = {(*block, seen) for block, counts in self._seen.items() for seen in counts}
        assert found == self._kept.keys(), "kept states are found by their blocks"
