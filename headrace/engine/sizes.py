"""The sizes of an engine that settings leave open: its KV cache, its sequences, and the prompt tokens of a pass.

On a CPU they are small and fixed (`ON_CPU`). On a GPU they follow from the memory that is left for them (`fitting`), whoever asks: the
rehearsal of a run, which knows what else will be on the GPU, or an engine that was started alone. Imports no torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

GIB = 2**30
BLOCK = 32
"""Tokens to whole multiples of which a sequence takes its cache."""


class Sizes(NamedTuple):
    kv_gib: float
    max_running: int
    prefill_chunk: int


class OpenSizes(NamedTuple):
    """`Sizes` of which settings say some. None: left open."""

    kv_gib: float | None = None
    max_running: int | None = None
    prefill_chunk: int | None = None

    def on_cpu(self) -> Sizes:
        return Sizes(
            ON_CPU.kv_gib if self.kv_gib is None else self.kv_gib,
            ON_CPU.max_running if self.max_running is None else self.max_running,
            ON_CPU.prefill_chunk if self.prefill_chunk is None else self.prefill_chunk,
        )


ON_CPU = Sizes(2.0, 64, 512)
MOST_RUNNING = 1024
"""Sequences at most that are chosen: for more there are no CUDA graphs (`native/runners/graphs.py`)."""
CHUNKS = (8192, 4096, 2048, 1024)
"""Prompt tokens of a pass that are chosen on a GPU: the first of them that leaves `1 - CHUNK_SHARE` of the room for other things."""
CHUNK_SHARE = 1 / 8
REUSED = 1.25
"""The cache is not chosen larger than what all sequences can fill, times this: for prompts whose entries are used again."""
RESERVED, CONTEXT = 0.05, GIB
"""Memory of a GPU that nobody is given: this share of it, for fragments and workspaces; and this much for each process on it, for CUDA's
context and captured graphs (assumed)."""


class Cost(NamedTuple):
    """Bytes on the device."""

    token: float
    """A token in the KV cache."""
    passing: float
    """A token while a pass forwards it."""
    row: float
    """A sequence while a token is drawn for it: its logits, and copies of them."""

    def sequence(self, tokens: int) -> float:
        """Returns the bytes of one sequence in the cache."""
        return -(-tokens // BLOCK) * BLOCK * self.token


class Demand(NamedTuple):
    """The requests that an engine is expected to get."""

    context: int
    """The most tokens of a sequence."""
    usual: float
    """Tokens that a sequence is expected to have while it decodes."""
    most: int = MOST_RUNNING
    """Sequences that there can be at once."""


STATES_A_ROW = 2
"""Slots for states of each sequence that runs, where a model has some: its own, and one that is kept for others."""


def cost(token: float, hidden: int, inner: int, vocabulary: int, size: float) -> Cost:
    """`size`: bytes of a number in the dtype of the weights. In a pass a token has some hidden states, and what an MLP makes of them; a
    row has float32 logits, their copy where filters sort them, and their block sums."""
    return Cost(token, (10 * hidden + 3 * inner) * size, 3 * 4 * vocabulary)


def usable(free: float, total: float, processes: int) -> float:
    """Returns the bytes of a GPU that may be planned with. `free`: of its `total` ones now; `processes`: those that will open it."""
    return max(0.0, free - RESERVED * total - CONTEXT * processes)


def fitting(asked: OpenSizes, room: float, one: Cost, demand: Demand) -> Sizes:
    """Returns sizes that take at most `room` bytes together, the ones that were asked for as they are.

    The cache may hold less than one sequence of `demand.context` tokens: `shortage` says so."""
    chunk = asked.prefill_chunk or next(
        (size for size in CHUNKS if size * one.passing <= CHUNK_SHARE * room), ON_CPU.prefill_chunk
    )
    room = max(0.0, room - chunk * one.passing)
    most = max(1, min(demand.most, MOST_RUNNING))
    usual = max(1.0, demand.usual) * one.token
    if asked.kv_gib is not None:
        return Sizes(asked.kv_gib, asked.max_running or max(1, min(most, int(asked.kv_gib * GIB / usual))), chunk)
    rows = asked.max_running or max(1, min(most, int(room / (usual + one.row))))
    wanted = max(REUSED * max(rows, most) * one.sequence(demand.context), ON_CPU.kv_gib * GIB)
    cache = min(wanted, max(0.0, room - rows * one.row))
    return Sizes(math.floor(1000 * cache / GIB) / 1000, rows, chunk)  # a setting that people read


def longest(sizes: Sizes, one: Cost) -> int:
    """Returns the most tokens of a sequence that the cache holds."""
    return int(sizes.kv_gib * GIB / one.token) // BLOCK * BLOCK
