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

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.core.batches import Row
from headrace.core.reports import TokenNumbers
from headrace.trainer.dealing.deal import Dealing, deal, step_paths
from headrace.trainer.dealing.row_paths import PickedRow
from headrace.trainer.dealing.trees import LEAST_SAVED
from headrace.trainer.packing.pack import ROOT, DealtRows, Pack, Segment, StepPlan, StepRows
from headrace.trainer.packing.packs import pack_trees


def pack_rows(given: StepRows, least_saved: int = LEAST_SAVED) -> StepPlan:
    """Splits the rows of an optimizer step into packs of at most `budget` forwarded tokens.

    A tree above the budget becomes several, which repeat what they share; a single row above it gets a pack of its own.
    Rows without a loss token are not forwarded. `least_saved`: the fewest tokens for which sampled tokens are shared. The result depends on
    the arguments alone.
    """
    (plan,) = _plans(given, Dealing(budget=given.budget, by_cost=False, share=given.share, least_saved=least_saved))
    return plan


def split_ranks(given: StepRows, ranks: int) -> list[StepPlan]:
    """Returns a plan for every rank, as `pack_rows` makes one; together they are the whole step (`dealing/deal.py`).

    All ranks get the same number of microbatches, because every one takes part in collectives; packs of one token without loss fill up.
    Where rows are forwarded one by one (`share` is false), the packs of one number have as many rows on every rank, for the same reason.
    Weights are those of the whole step (C9), so gradients are summed over ranks, never averaged. The first rank's plan counts all dropped
    tokens.
    """
    return _plans(given, Dealing(budget=given.budget, ranks=ranks, share=given.share))


def _plans(given: StepRows, dealing: Dealing) -> list[StepPlan]:
    shares = deal(step_paths(given.rows, given.trajectories), dealing)
    more = {"constant": given.constant, "step": given.step}
    return [plan_of(DealtRows(share, given.aggregation, **more)) for share in shares]


def plan_of(given: DealtRows) -> StepPlan:
    """The plan of one rank."""
    dealt = given.dealt
    weights = np.array(given.aggregation(dealt.counts.tolist(), given.constant), np.float32)
    made = [pack_trees(roots, given.step, dealt.routed, weights) for roots in dealt.microbatches]
    packs = [pack for pack, _ in made] + [empty_pack(dealt.routed)] * dealt.filling
    if dealt.levels:
        packs = list(map(_with_rows, packs, dealt.levels))
    return StepPlan(tuple(packs), dealt.dropped_tokens, sum(conflicts for _, conflicts in made), dealt.split)


def pack_sequence(tokens: Sequence[int]) -> Pack:
    """A pack of one sequence in which every token but the first is scored: M = N = T - 1."""
    count = len(tokens) - 1
    zeros, row_tokens = (0.0,) * count, tuple(tokens[1:])
    row = Row(tuple(tokens[:1]), row_tokens, zeros, zeros, mask=(True,) * count, versions=(0,) * count)
    given = StepRows([row], lambda counts, _: [1.0] * len(counts), constant=0, budget=len(tokens), step=0)
    return pack_rows(given).packs[0]


def fill_up(plan: StepPlan, *, least: int, multiple: int) -> StepPlan:
    """The plan with packs of one token without loss, until there are at least so many, and a multiple of that. A plan of nothing stays."""
    count = len(plan.packs)
    if not count:
        return plan
    routing = plan.packs[0].routing
    routed = None if routing is None else (routing.shape[1], routing.shape[2])
    more = -(-max(count, least) // multiple) * multiple - count
    return replace(plan, packs=(*plan.packs, *(empty_pack(routed),) * more))


def _with_rows(pack: Pack, count: int) -> Pack:
    """The pack with rows of one token without loss, until there are so many."""
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


def empty_pack(routed: tuple[int, int] | None) -> Pack:
    """N = 1, M = 0: a forward pass that takes part in every collective and adds no gradient."""
    ints, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    zero = torch.zeros(1, dtype=torch.int64)
    routing = None if routed is None else torch.full((1, *routed), -1, dtype=torch.int16)
    segments = (Segment(0, 1, ROOT),)
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
        turn=ints,
        row=ints,
        lag=floats,
        apart=torch.zeros(0, dtype=torch.int8),
        unmixed=torch.zeros(0, dtype=torch.bool),
        kept=None,
        routing=routing,
    )


# --- Numbers of loss tokens
# Numbers of loss tokens, put back at the places that these tokens have in the rows of the batch. Rows are picked up to a budget of tokens,
# because the journal keeps what is collected.


class PickedNumbers:
    """The trainer's log-probs and entropies of the picked rows of one step, collected from microbatches and ranks."""

    def __init__(self, rows: Sequence[PickedRow]) -> None:
        self._rows = {row.row: row for row in rows}
        self._losses = {row.row: torch.from_numpy(row.losses) for row in rows}
        total = sum(row.tokens for row in rows)
        self._values = torch.zeros(2, total, dtype=torch.float64)
        """[2, tokens of the picked rows] log-probs and entropies; 0 where another rank has them. Sums over ranks are exact."""

    def add(self, pack: Pack, logprob: Tensor, entropy: Tensor) -> None:
        """Takes the numbers [M] of a microbatch."""
        rows = pack.row.cpu()
        if not (here := [number for number in rows.unique().tolist() if number in self._rows]):
            return
        values = torch.stack([logprob.detach(), entropy.detach()]).cpu().double()
        for number in here:
            self._values[:, self._losses[number]] = values[:, rows == number]

    def combine(self, add: Callable[[Tensor], Tensor]) -> None:
        """Replaces the numbers of one rank by those of all. `add`: sums elementwise over the ranks."""
        self._values = add(self._values.flatten()).view(2, -1)

    def report(self) -> tuple[TokenNumbers, ...]:
        found = torch.full(self._values.shape, math.nan)
        for losses in self._losses.values():
            found[:, losses] = self._values[:, losses].float()
        return tuple(
            TokenNumbers(
                row.ticket,
                row.number,
                *(values[row.start : row.start + row.tokens].numpy().tobytes() for values in found),
            )
            for row in self._rows.values()
        )
