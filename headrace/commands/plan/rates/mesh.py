"""Ranks of a trainer on their mesh: the memory of each, and what travels between them (`trainer/placement/sharded.py`).

    a rank holds            weights, gradients and AdamW's state of parameters / split, where split = shard · context · tensor
    gathered at once        the root (embedding, head) and two layers, with their gradients
    all-gather              every layer `passes` times a microbatch, the root once
    reduce-scatter          every layer and the root, in float32, once a microbatch or once a step (`parallel.sums_once`); gradients of the
                            whole model are then on every rank
    all-reduce              the rank's part of all gradients once a step, if there are copies of the split
    all-to-all              a token's hidden state to each of its experts and back, forward and backward, if experts are split whole;
                            these are neither gathered nor reduced
    all-reduce              with layers split by the model's plan (`tensor`), hidden states: after attention, MLP and embedding; and their
                            gradients: before q, k, v, gate and up, and before the head for places with targets. The former have the
                            dtype of the computation, the latter float32. All else is divided by `tensor`
    attention               between ranks that compute a microbatch together (`context`): queries, keys, values and results of all
                            tokens, forward and backward; or keys and values alone, where the ranks do not divide the heads

A rank receives (n - 1) / n of what n ranks gather, reduce or exchange, and twice that in an all-reduce (ring; Patarasuk and Yuan, 2009).
tests/trainer/ranks/test_traffic.py compares with what torch sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.trainer.parallel import LOOPS, ParallelConfig, cut, repeats, stages_of

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one rank, and the bytes that it receives: all per microbatch, `copied` and `summed` per step."""

    gathers: int
    gathered: float
    reductions: int
    reduced: float
    copied: float
    """Bytes of all-reduces between copies of the split."""
    summed: float = 0.0
    """Bytes of reduce-scatters once a step, which `reductions` counts in that case."""
    exchanged: float = 0.0
    """Bytes for each token that it forwards, to and from experts."""
    attended: float = 0.0
    """Bytes for each token that it forwards, of attention."""
    sums: int = 0
    """All-reduces in a tensor group."""
    added: float = 0.0
    """Bytes of these for each token of a layer's or the embedding's hidden states."""
    scored: float = 0.0
    """Bytes of these for each place with a target."""

    def microbatch(self, tokens: int) -> float:
        """Bytes of a microbatch that travel while a rank computes."""
        return self.gathered + self.reduced + self.exchanged * tokens

    def together(self, tokens: int) -> float:
        """Bytes of a microbatch for which a tensor group waits, if every token is one with a target."""
        return (self.added + self.scored) * tokens


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
    hidden: int = 0,
    width: float = 0.0,
    computed: int = BFLOAT16,
    heads: Heads | None = None,
) -> Traffic:
    """`inner`: parameters of all layers, without experts that are split whole (`expert`); `outer`: all others. Every one is trained.
    `width`: elements of hidden states that a token sends to experts; `hidden`: of one; `computed`: bytes of each. Layers of a tensor
    group have five products before attention and MLP, as Llama's do. `heads`: of every layer, needed where microbatches are computed
    together by `context`."""
    passes, size = 2 if mesh.reshard else 1, BFLOAT16 if mesh.gather == "bfloat16" else FLOAT32
    share, gathers = (mesh.gathering - 1) / mesh.gathering, mesh.gathering > 1
    ring = lambda ranks: 2 * (ranks - 1) / ranks  # noqa: E731
    inner, outer = inner / mesh.tensor, outer / mesh.tensor
    reduced, once = share * (inner + outer) * FLOAT32, mesh.reduce == "step"
    return Traffic(
        gathers=(passes * layers + 1) * gathers,
        gathered=share * (passes * inner * size + outer * FLOAT32),
        reductions=(layers + 1) * gathers,
        reduced=0.0 if once else reduced,
        copied=ring(mesh.replicate) * (inner + outer) / mesh.gathering * FLOAT32,
        summed=reduced if once else 0.0,
        exchanged=(mesh.split - 1) / mesh.split * 4 * width * computed if mesh.expert > 1 else 0.0,
        attended=layers * _attended(mesh.context, heads, computed) if heads else 0.0,
        sums=7 * layers + 4 if mesh.tensor > 1 else 0,
        added=ring(mesh.tensor) * hidden * (layers * (2 * computed + 5 * FLOAT32) + FLOAT32),
        scored=ring(mesh.tensor) * FLOAT32 * (hidden + 4),
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
    """Weights that are whole for a moment, and gradients that are so for a moment or until the end of a step, at most."""


def rank_memory(
    mesh: ParallelConfig, *, layers: int, inner: float, outer: float, experts: float = 0.0, each: int = 16
) -> RankMemory:
    """`inner` and `outer` as for `traffic`, `experts`: parameters of those that are split whole. `each`: bytes per parameter of weights,
    gradients and AdamW's state."""
    size = BFLOAT16 if mesh.gather == "bfloat16" else FLOAT32
    whole = min(2, layers) if mesh.reshard else layers
    split = (inner + outer + experts) / mesh.split
    inner, outer = inner / mesh.tensor, outer / mesh.tensor
    weights = inner * whole / layers * size + outer * FLOAT32
    gradients = (inner * (1.0 if mesh.reduce == "step" else min(2, layers) / layers) + outer) * FLOAT32
    return RankMemory(split * each, weights + gradients if mesh.gathering > 1 else 0.0)


# --- Ranks of a trainer that form a pipeline
# The memory of each, what travels, and how long they wait (`trainer/placement/staged.py`).
#
# p ranks have v stages each, and a step has m microbatches of N tokens, with H elements in a hidden state:
#
#     a rank waits        (p - 1) / (v m + p - 1) of a step, if stages cost the same (arXiv 2104.04473, section 2.2); with gradients of weights
#                         computed meanwhile, (p - 1) / (3 v m + p - 1), where the three products of a stage cost the same (arXiv 2401.10241)
#     a rank holds        weights, gradients and AdamW's state of its layers; the first that of the embedding, the last that of the head
#     in flight           activations of its stages, and what they received, for as many microbatches as have been forwarded and not yet backwarded
#     all send            a hidden state forward and its gradient backward, 4 N H bytes each, for every microbatch and stage boundary
#
# tests/trainer/ranks/test_bubble.py compares with the order of torch's schedules and with what is sent.


BYTES_OF_FLOAT32 = 4


def waiting(schedule: str, ranks: int, microbatches: int) -> float:
    """The share of a step in which a rank waits."""
    ends, work = ranks - 1, LOOPS[schedule] * microbatches
    if schedule == "zero_bubble":
        return ends / (3 * work + ends)
    return ends / (work + ends)


def in_flight(schedule: str, ranks: int, microbatches: int) -> float:
    """The most microbatches whose activations the first rank keeps, counted in passes over all of its layers."""
    if schedule == "gpipe":
        return microbatches
    if LOOPS[schedule] == 1:
        return min(ranks, microbatches)
    if schedule == "zero_bubble":
        return ranks
    return min((3 * ranks - 1) / 2, microbatches)  # p - 1 stages more than once round (arXiv 2104.04473)


@dataclass(frozen=True)
class PipelineMemory:
    """Bytes of the fullest rank."""

    held: float
    """Weights, gradients and AdamW's state."""
    received: float
    """Hidden states of the microbatches in flight, without what layers keep of them."""


def pipeline_memory(
    schedule: str,
    ranks: int,
    *,
    layers: int,
    inner: float,
    embedding: float,
    head: float,
    tied: bool = False,
    microbatches: int = 0,
    tokens: int = 0,
    hidden: int = 0,
    each: int = 16,
) -> PipelineMemory:
    """`inner`: parameters of all layers; `embedding` and `head`: of these matrices, equal if `tied`. `each`: bytes per parameter of
    weights, gradients and AdamW's state. A tied head has no state of its own."""
    stages = ranks * LOOPS[schedule]
    bounds = cut([inner / layers] * layers, stages, head)
    held = []
    for rank in range(ranks):
        mine = stages_of(rank, ranks, schedule)
        size = sum(len(bounds[stage]) for stage in mine) * inner / layers * each
        size += embedding * each if 0 in mine else 0.0
        size += head * (each / 2 if tied else each) if stages - 1 in mine else 0.0
        held.append(size)
    received = LOOPS[schedule] * in_flight(schedule, ranks, microbatches) * tokens * hidden * BYTES_OF_FLOAT32
    return PipelineMemory(max(held), received)


def sent(schedule: str, ranks: int, tokens: int, hidden: int) -> float:
    """Bytes that all ranks together send for a microbatch."""
    return 2 * (ranks * LOOPS[schedule] - 1) * tokens * hidden * BYTES_OF_FLOAT32
