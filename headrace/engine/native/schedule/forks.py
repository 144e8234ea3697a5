"""Forks: sequences that continue from an earlier token of another sequence, using the cache entries that it left.

No block is held for possible forks: a finished sequence is remembered with the serial numbers of its blocks, and a fork checks
that these have not changed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.core.types import Fork
from headrace.engine.native.cache.blocks import Blocks
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.schedule.scheduler import Scheduler
from headrace.engine.native.schedule.sequences import Pinned, Running, Sequence

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

    def remember(self, sequence: Sequence) -> None:
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

    def _look(self, sequence: Sequence) -> Past:
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
        self._blocks.hold(blocks)
        return Pinned(blocks, needed, past.kv_version if needed else -1)
