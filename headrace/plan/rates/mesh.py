"""Ranks of a trainer on their mesh: the memory of each, and what travels between them (`trainer/placement/sharded.py`).

    a rank holds            weights, gradients and AdamW's state of parameters / split, where split = shard · context
    gathered at once        the root (embedding, head) and two layers, with their gradients
    all-gather              every layer `passes` times a microbatch, the root once
    reduce-scatter          every layer and the root once a microbatch, in float32
    all-reduce              the rank's part of all gradients once a step, if there are copies of the split
    all-to-all              a token's hidden state to each of its experts and back, forward and backward, if experts are split whole;
                            these are neither gathered nor reduced
    attention               between ranks that compute a microbatch together (`context`): queries, keys, values and results of all
                            tokens, forward and backward; or keys and values alone, where the ranks do not divide the heads

A rank receives (n - 1) / n of what n ranks gather, reduce or exchange, and twice that in an all-reduce (ring; Patarasuk and Yuan, 2009).
tests/trainer/ranks/test_traffic.py compares with what torch sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.trainer.parallel import ParallelConfig, repeats

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one rank, and the bytes that it receives: all per microbatch, `copied` per step."""

    gathers: int
    gathered: float
    reductions: int
    reduced: float
    copied: float
    """Bytes of all-reduces between copies of the split."""
    exchanged: float = 0.0
    """Bytes for each token that it forwards, to and from experts."""
    attended: float = 0.0
    """Bytes for each token that it forwards, of attention."""

    def microbatch(self, tokens: int) -> float:
        """Bytes of a microbatch, without those of attention."""
        return self.gathered + self.reduced + self.exchanged * tokens


@dataclass(frozen=True)
class Heads:
    """The attention of a layer."""

    query: int
    key: int
    size: int
    """Elements of each."""


def traffic(
    mesh: ParallelConfig,
    *,
    layers: int,
    inner: float,
    outer: float,
    width: float = 0.0,
    computed: int = BFLOAT16,
    heads: Heads | None = None,
) -> Traffic:
    """`inner`: parameters of all layers, without experts that are split whole (`expert`); `outer`: all others. Every one is trained.
    `width`: elements of hidden states that a token sends to experts; `computed`: bytes of each. `heads`: of every layer, needed where
    microbatches are computed together."""
    passes, size = 2 if mesh.reshard else 1, BFLOAT16 if mesh.gather == "bfloat16" else FLOAT32
    share = (mesh.split - 1) / mesh.split
    copies = 2 * (mesh.replicate - 1) / mesh.replicate
    return Traffic(
        gathers=passes * layers + 1,
        gathered=share * (passes * inner * size + outer * FLOAT32),
        reductions=layers + 1,
        reduced=share * (inner + outer) * FLOAT32,
        copied=copies * (inner + outer) / mesh.split * FLOAT32,
        exchanged=share * 4 * width * computed if mesh.expert > 1 else 0.0,
        attended=layers * _attended(mesh.context, heads, computed) if heads else 0.0,
    )


def _attended(context: int, heads: Heads, computed: int) -> float:
    """Bytes for each token in a layer. Gradients of gathered keys and values are summed in float32."""
    times = repeats(heads.query, heads.key, context)
    if not times:
        return (context - 1) * 2 * heads.key * heads.size * (computed + FLOAT32)
    return (context - 1) / context * 2 * (2 * heads.query + 2 * times * heads.key) * heads.size * computed


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one rank, without activations."""

    held: float
    """Weights, gradients and AdamW's state of its part."""
    gathered: float
    """Weights and gradients that are whole for a moment, at most."""


def rank_memory(
    mesh: ParallelConfig, *, layers: int, inner: float, outer: float, experts: float = 0.0, each: int = 16
) -> RankMemory:
    """`inner` and `outer` as for `traffic`, `experts`: parameters of those that are split whole. `each`: bytes per parameter of weights,
    gradients and AdamW's state."""
    size = BFLOAT16 if mesh.gather == "bfloat16" else FLOAT32
    whole = min(2, layers) if mesh.reshard else layers
    weights = inner * whole / layers * size + outer * FLOAT32
    gradients = (inner * min(2, layers) / layers + outer) * FLOAT32
    split = (inner + outer + experts) / mesh.split
    return RankMemory(split * each, weights + gradients if mesh.split > 1 else 0.0)
