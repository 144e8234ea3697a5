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
from collections.abc import Sequence

from headrace.core.batches import Row
from headrace.trainer.packing.columns import pack_trees
from headrace.trainer.packing.pack import Pack, StepPlan, StepRows
from headrace.trainer.packing.tree import LEAST_SAVED, TreeNode, cut, first_fit, grow, path_of, prune, size_of


def pack_rows(given: StepRows, least_saved: int = LEAST_SAVED) -> StepPlan:
    """Splits the rows of an optimizer step into packs of at most `budget` forwarded tokens.

    A tree above the budget becomes several, which repeat what they share; a single row above it gets a pack of its own.
    Rows without a loss token are not forwarded. `least_saved`: the fewest tokens for which sampled tokens are shared. The result depends on
    the arguments alone.
    """
    losses = [loss_places(row) for row in given.rows]
    routed = routed_of(given.rows)
    pieces = trees_of(given, losses, routed, least_saved)
    return plan_of(microbatches_of(pieces, given.budget), given.step, routed, dropped(given.rows, losses))


def trees_of(
    given: StepRows,
    losses: Sequence[Sequence[int]],
    routed: tuple[int, int] | None,
    least_saved: int = LEAST_SAVED,
) -> list[TreeNode]:
    """The trees of the rows, each of one temperature, and within the budget or of a single row."""
    for row in given.rows:
        assert row.prompt, "the first token of a completion is predicted from the prompt"
    weights = given.aggregation(list(map(len, losses)), given.constant)
    kept = [one for one in zip(given.rows, losses, weights, range(len(given.rows)), strict=True) if one[1]]
    paths = [path_of(row, loss, weight, routed, number) for row, loss, weight, number in kept]
    if not given.share:
        return [TreeNode(path, 0, len(path.tokens), ending=[path]) for path in paths]
    temperatures = dict.fromkeys(path.row.temperature for path in paths)
    roots = [root for one in temperatures for root in grow(path for path in paths if path.row.temperature == one)]
    prune(roots, least_saved)
    return [piece for root in roots for piece in cut(root, given.budget)]


def microbatches_of(trees: Sequence[TreeNode], budget: int) -> list[list[TreeNode]]:
    """Puts trees of one temperature together, as many as the budget allows."""
    temperatures = sorted({tree.source.row.temperature for tree in trees})
    alike = ([tree for tree in trees if tree.source.row.temperature == one] for one in temperatures)
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
