"""Ranks of a trainer that form a pipeline: the memory of each, what travels, and how long they wait (`trainer/placement/staged.py`).

p ranks have v stages each, and a step has m microbatches of N tokens, with H elements in a hidden state:

    a rank waits        (p - 1) / (v m + p - 1) of a step, if stages cost the same (arXiv 2104.04473, section 2.2); with gradients of weights
                        computed meanwhile, (p - 1) / (3 v m + p - 1), where the three products of a stage cost the same (arXiv 2401.10241)
    a rank holds        weights, gradients and AdamW's state of its layers; the first that of the embedding, the last that of the head
    in flight           activations of its stages, and what they received, for as many microbatches as have been forwarded and not yet backwarded
    all send            a hidden state forward and its gradient backward, 4 N H bytes each, for every microbatch and stage boundary

tests/trainer/ranks/test_bubble.py compares with the order of torch's schedules and with what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.trainer.parallel import LOOPS, cut, stages_of

FLOAT32 = 4


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
    received = LOOPS[schedule] * in_flight(schedule, ranks, microbatches) * tokens * hidden * FLOAT32
    return PipelineMemory(max(held), received)


def sent(schedule: str, ranks: int, tokens: int, hidden: int) -> float:
    """Bytes that all ranks together send for a microbatch."""
    return 2 * (ranks * LOOPS[schedule] - 1) * tokens * hidden * FLOAT32
