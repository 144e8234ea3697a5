"""A batch becomes packed microbatches without padding, each within a token budget.

Rows that begin alike form a tree: what they share is forwarded once, and every row attends to its own path.

    rows      p p p a a a      p p p b b            one group: G completions of the prompt p p p
    tokens    p p p a a b                           N = 6: tokens that predict no loss token are not forwarded
    positions 0 1 2 3 4 3
    segments  (0, 3, root) (3, 2, parent 0) (5, 1, parent 0)
    predictor 2 3 4 2 5                             M = 5: logits at these places predict a a a b b

Only the split depends on the budget: weights come from the whole step (`algo/objective.py`, C9).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.batches import Batch, Row
from headrace.core.reports import TokenNumbers
from headrace.trainer.packing.pack import ROOT, Pack, Segment, StepPlan, StepRows
from headrace.trainer.packing.trees import (
    LEAST_SAVED,
    TreeNode,
    cut,
    first_fit,
    grow,
    pack_trees,
    path_of,
    preorder,
    prune,
    size_of,
)


def pack_rows(given: StepRows, least_saved: int = LEAST_SAVED) -> StepPlan:
    """Splits the rows of an optimizer step into packs of at most `budget` forwarded tokens.

    A tree above the budget becomes several, which repeat what they share; a single row above it gets a pack of its own.
    Rows without a loss token are not forwarded. `least_saved`: the fewest tokens for which sampled tokens are shared. The result depends on
    the arguments alone.
    """
    losses = [loss_places(row) for row in given.rows]
    routed = routed_of(given.rows)
    pieces = microbatches_of(trees_of(given, losses, routed, least_saved), given.budget)
    plan = plan_of(pieces, given.step, routed, dropped(given.rows, losses))
    return replace(plan, split=bool(given.trajectories) and splits(pieces))


def trees_of(
    given: StepRows,
    losses: Sequence[Sequence[int]],
    routed: tuple[int, int] | None,
    least_saved: int = LEAST_SAVED,
) -> list[TreeNode]:
    """The trees of the rows, each of one temperature, and within the budget or of a single row."""
    for row in given.rows:
        assert row.prompt, "the first token of a completion is predicted from the prompt"
    trajectories = trajectories_of_losses(given.trajectories or [(number,) for number in range(len(losses))], losses)
    counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *trajectories]))
    weights = np.array(given.aggregation(counts.tolist(), given.constant), np.float32)
    paths = [
        path_of(row, loss, trajectory=of_row, weight=weights[of_row], routed=routed, number=number)
        for number, (row, loss, of_row) in enumerate(zip(given.rows, losses, trajectories, strict=True))
        if loss
    ]
    if not given.share:
        return [TreeNode(path, 0, len(path.tokens), ending=[path]) for path in paths]
    temperatures = dict.fromkeys(path.row.temperature for path in paths)
    roots = [
        root
        for temperature in temperatures
        for root in grow(path for path in paths if path.row.temperature == temperature)
    ]
    prune(roots, least_saved)
    return [piece for root in roots for piece in cut(root, given.budget)]


def trajectories_of_losses(
    trajectories: Sequence[Sequence[int]], losses: Sequence[Sequence[int]]
) -> list[NDArray[np.int64]]:
    """The trajectory of every loss token of each row."""
    given = [np.array(of_row, np.int64) for of_row in trajectories]
    return [
        of_row[list(loss)] if len(of_row) > 1 else of_row.repeat(len(loss))
        for of_row, loss in zip(given, losses, strict=True)
    ]


def splits(microbatches: Iterable[Sequence[TreeNode]]) -> bool:
    """Whether two of the microbatches have tokens of one trajectory."""
    found: dict[int, int] = {}
    for number, roots in enumerate(microbatches):
        for path in (path for node in preorder(roots) for path in node.ending):
            if any(found.setdefault(one, number) != number for one in np.unique(path.trajectory).tolist()):
                return True
    return False


def microbatches_of(trees: Sequence[TreeNode], budget: int) -> list[list[TreeNode]]:
    """Puts trees of one temperature together, as many as the budget allows."""
    temperatures = sorted({tree.source.row.temperature for tree in trees})
    alike = ([tree for tree in trees if tree.source.row.temperature == temperature] for temperature in temperatures)
    return [found for those in alike for found in first_fit(those, size_of, budget)]


def plan_of(
    microbatches: Sequence[Sequence[TreeNode]], step: int, routed: tuple[int, int] | None, dropped_tokens: int
) -> StepPlan:
    packs = [pack_trees(roots, step, routed) for roots in microbatches]
    return StepPlan(tuple(pack for pack, _ in packs), dropped_tokens, sum(conflicts for _, conflicts in packs))


def pack_sequence(tokens: Sequence[int]) -> Pack:
    """A pack of one sequence in which every token but the first is scored: M = N = T - 1."""
    count = len(tokens) - 1
    zeros, row_tokens = (0.0,) * count, tuple(tokens[1:])
    row = Row(tuple(tokens[:1]), row_tokens, zeros, zeros, mask=(True,) * count, versions=(0,) * count)
    given = StepRows([row], lambda counts, _: [1.0] * len(counts), constant=0, budget=len(tokens), step=0)
    return pack_rows(given).packs[0]


def loss_places(row: Row) -> tuple[int, ...]:
    """Indices of a row's tokens in the loss: not masked, with a finite log-prob of the sampler to compare with."""
    kept = enumerate(zip(row.mask, row.logprobs, strict=True))
    return tuple(i for i, (mask, logprob) in kept if mask and math.isfinite(logprob))


def dropped(rows: Sequence[Row], losses: Sequence[Sequence[int]]) -> int:
    """The number of tokens that would be in the loss but have no finite log-prob of the sampler."""
    return sum(sum(row.mask) for row in rows) - sum(map(len, losses))


def routed_of(rows: Sequence[Row]) -> tuple[int, int] | None:
    """(layers, k) of the recorded experts; None if no row has any."""
    return next(((row.routing.layers, row.routing.k) for row in rows if row.routing is not None), None)


# --- Spreads the rows of a step over data-parallel ranks
# Every rank calls `split_ranks` with the same rows, in place of `pack_rows`, and takes its own plan (`Placement.plan`).


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
    split = bool(given.trajectories) and splits(roots for mine in bins for roots in mine)
    plans = []
    for rank, mine in enumerate(bins):
        plan = plan_of(mine, given.step, routed, 0 if rank else dropped(given.rows, losses))
        filling = (_empty_pack(routed),) * (most - len(mine))
        plans.append(replace(plan, packs=plan.packs + filling, split=split))
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
        trajectory=ints,
        row=ints,
        lag=floats,
        swapped=swapped,
        unmixed=swapped,
        kept=None,
        routing=routing,
    )


# --- Numbers of loss tokens
# Numbers of loss tokens, put back at the places that these tokens have in the rows of the batch. Rows are picked up to a budget of tokens,
# because the journal keeps what is collected.


MOST_TOKENS = 1 << 15
"""Tokens of a step whose numbers are recorded: 8 bytes each, a third more in the journal, which has about 80 bytes of every token."""


@dataclass(frozen=True)
class PickedRow:
    ticket: int
    number: int
    """Its place among the rows of its group."""
    start: int
    """The place of its first token among the tokens of all picked rows."""
    tokens: int
    losses: Tensor
    """[M] int64: places of its loss tokens among the tokens of all picked rows."""


class PickedNumbers:
    """The trainer's log-probs and entropies of the picked rows of one step, collected from microbatches and ranks.

    Rows are picked from the group `step` modulo the number of groups on, so that neither good nor bad, short nor long ones are favoured; the
    first one is picked whatever its length."""

    def __init__(self, batch: Batch, most: int = MOST_TOKENS) -> None:
        self._rows = dict(_pick(batch, most))
        """The rows by their numbers in the step."""
        total = sum(row.tokens for row in self._rows.values())
        self._values = torch.zeros(2, total, dtype=torch.float64)
        """[2, tokens of the picked rows] log-probs and entropies; 0 where another rank has them. Sums over ranks are exact."""

    def add(self, pack: Pack, logprob: Tensor, entropy: Tensor) -> None:
        """Takes the numbers [M] of a microbatch."""
        rows = pack.row.cpu()
        if not (here := [number for number in rows.unique().tolist() if number in self._rows]):
            return
        values = torch.stack([logprob.detach(), entropy.detach()]).cpu().double()
        for number in here:
            self._values[:, self._rows[number].losses] = values[:, rows == number]

    def combine(self, add: Callable[[Tensor], Tensor]) -> None:
        """Replaces the numbers of one rank by those of all. `add`: sums elementwise over the ranks."""
        self._values = add(self._values.flatten()).view(2, -1)

    def report(self) -> tuple[TokenNumbers, ...]:
        found = torch.full(self._values.shape, math.nan)
        for row in self._rows.values():
            found[:, row.losses] = self._values[:, row.losses].float()
        return tuple(
            TokenNumbers(
                row.ticket,
                row.number,
                *(values[row.start : row.start + row.tokens].numpy().tobytes() for values in found),
            )
            for row in self._rows.values()
        )


def _pick(batch: Batch, most: int) -> Iterator[tuple[int, PickedRow]]:
    start = 0
    for number, ticket, place, row in _rotated(batch):
        if start and start + len(row.tokens) > most:
            return
        losses = torch.tensor(loss_places(row), dtype=torch.int64) + start
        yield number, PickedRow(ticket, place, start, len(row.tokens), losses)
        start += len(row.tokens)


def _rotated(batch: Batch) -> Iterator[tuple[int, int, int, Row]]:
    """Yields the rows of the step from one of its groups on: number in the step, ticket, number in the group, row."""
    numbered, number = [], 0
    for group in batch.groups:
        numbered.append([(number + place, group.ticket, place, row) for place, row in enumerate(group.rows)])
        number += len(group.rows)
    first = batch.step % max(1, len(numbered))
    for rows in (*numbered[first:], *numbered[:first]):
        yield from rows
