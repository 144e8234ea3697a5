"""Spreads the rows of a step over data-parallel ranks. Every rank calls `split_ranks` with the same rows, in place of
`pack_rows`, and takes its own plan (`Placement.plan`)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from headrace.trainer.packing.pack import ROOT, Pack, Segment, StepPlan, StepRows
from headrace.trainer.packing.plan import dropped, loss_places, microbatches_of, plan_of, routed_of, trees_of
from headrace.trainer.packing.tree import TreeNode, preorder, size_of

TOKEN_COST = 4096
"""The cost of a token, in pairs of tokens that attend to each other: 24 H² operations a layer against 4 H for a pair, so 6 H.
H = 576 (135M parameters) gives 3,456, H = 1024 (0.6B) 6,144."""


def split_ranks(given: StepRows, ranks: int) -> list[StepPlan]:
    """Returns a plan for every rank, as `pack_rows` makes one; together they are the whole step.

    Whole trees go, the most expensive first, to the rank with the least work: at most 4/3 of the best possible maximum (Graham 1969).
    Trees too large for that are split and repeat what they share. All ranks get the same number of microbatches, because every one takes
    part in collectives; packs of one token without loss fill up. Where rows are forwarded one by one (`share` is false), the packs of one
    number have as many rows on every rank, for the same reason. Weights are those of the whole step (C9), so gradients are
    summed over ranks, never averaged. The first rank's plan counts all dropped tokens.
    """
    losses = [loss_places(row) for row in given.rows]
    routed = routed_of(given.rows)

    def trees(limit: int) -> list[TreeNode]:
        return trees_of(replace(given, budget=limit), losses, routed)

    bins = [microbatches_of(mine, given.budget) for mine in _balanced(trees, given.budget, ranks)]
    most = max(map(len, bins))
    plans = []
    for rank, mine in enumerate(bins):
        plan = plan_of(mine, given.step, routed, 0 if rank else dropped(given.rows, losses))
        filling = (_empty_pack(routed),) * (most - len(mine))
        plans.append(StepPlan(plan.packs + filling, plan.dropped_tokens, plan.routing_conflicts))
    return plans if given.share else _levelled(plans)


def fill_up(plan: StepPlan, *, least: int, multiple: int) -> StepPlan:
    """The plan with packs of one token without loss, until there are at least so many, and a multiple of that. A plan of nothing stays."""
    count = len(plan.packs)
    if not count:
        return plan
    routing = plan.packs[0].routing
    routed = None if routing is None else (routing.shape[1], routing.shape[2])
    more = -(-max(count, least) // multiple) * multiple - count
    return replace(plan, packs=(*plan.packs, *(_empty_pack(routed),) * more))


def cost_of(root: TreeNode) -> int:
    """The cost of a forward pass, in pairs: every token attends to its ancestors and to the tokens before it in its own node."""
    nodes = list(preorder([root]))
    pairs = sum(node.length * node.start + node.length * (node.length + 1) // 2 for node in nodes)
    return TOKEN_COST * sum(node.length for node in nodes) + pairs


def _balanced(trees: Callable[[int], list[TreeNode]], budget: int, ranks: int) -> list[list[TreeNode]]:
    """The trees of each rank. Often the whole step is one tree (prompts share a template); smaller trees balance better and repeat
    more. A few sizes are tried, and the one is taken whose busiest rank has the least work."""
    total = sum(map(size_of, trees(budget)))
    limits = {min(budget, -(-total // (ranks * parts))) or 1 for parts in (1, 2, 4)} if ranks > 1 else {budget}
    tried = [_dealt(trees(limit), ranks) for limit in sorted(limits, reverse=True)]
    return min(tried, key=lambda hands: max(sum(map(cost_of, hand)) for hand in hands))


def _dealt(pieces: Sequence[TreeNode], ranks: int) -> list[list[TreeNode]]:
    loads = [(0, rank) for rank in range(ranks)]
    hands: list[list[TreeNode]] = [[] for _ in range(ranks)]
    for cost, piece in sorted(((cost_of(piece), piece) for piece in pieces), key=lambda priced: -priced[0]):
        load, rank = heapq.heappop(loads)
        hands[rank].append(piece)
        heapq.heappush(loads, (load + cost, rank))
    return hands


def _levelled(plans: Sequence[StepPlan]) -> list[StepPlan]:
    """The plans with rows of one token without loss in packs that have fewer rows than those of another rank."""
    rows = [max(len(pack.segments) for pack in packs) for packs in zip(*(plan.packs for plan in plans), strict=True)]
    levelled = [tuple(map(_with_rows, plan.packs, rows)) for plan in plans]
    return [replace(plan, packs=packs) for plan, packs in zip(plans, levelled, strict=True)]


def _with_rows(pack: Pack, count: int) -> Pack:
    more, end = count - len(pack.segments), len(pack.tokens)
    zeros = torch.zeros(more, dtype=torch.int64)
    routing = pack.routing
    if routing is not None:
        routing = torch.cat([routing, routing.new_full((more, *routing.shape[1:]), -1)])
    return replace(
        pack,
        tokens=torch.cat([pack.tokens, zeros]),
        positions=torch.cat([pack.positions, zeros]),
        segments=pack.segments + tuple(Segment(end + number, 1, ROOT) for number in range(more)),
        routing=routing,
    )


def _empty_pack(routed: tuple[int, int] | None) -> Pack:
    """N = 1, M = 0: a forward pass that takes part in every collective and adds no gradient."""
    ints, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    zero = torch.zeros(1, dtype=torch.int64)
    routing = None if routed is None else torch.full((1, *routed), -1, dtype=torch.int16)
    segments = (Segment(0, 1, ROOT),)
    swapped = torch.zeros(0, dtype=torch.bool)
    return Pack(
        tokens=zero,
        positions=zero,
        segments=segments,
        predictor=ints,
        target=ints,
        sampled=floats,
        advantage=floats,
        weight=floats,
        sequence=ints,
        row=ints,
        lag=floats,
        swapped=swapped,
        unmixed=swapped,
        kept=None,
        routing=routing,
    )
