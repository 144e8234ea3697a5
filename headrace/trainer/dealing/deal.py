"""The trees of a step's rows, dealt to data-parallel ranks as microbatches: the controller does it once for all of them.

Whole trees go, the most expensive first, to the rank with the least work: at most 4/3 of the best possible maximum (Graham 1969). Trees too
large for that are split and repeat what they share.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.core.batches import Row
from headrace.trainer.dealing.row_paths import Path, Routed, dropped, path_of, routed_of
from headrace.trainer.dealing.trees import LEAST_SAVED, TreeNode, cut, first_fit, grow, preorder, prune, size_of
from headrace.trainer.parallel import ParallelConfig

TOKEN_COST = 4096
"""The cost of a token, in pairs of tokens that attend to each other: 24 H² operations a layer against 4 H for a pair, so 6 H.
H = 576 (135M parameters) gives 3,456, H = 1024 (0.6B) 6,144."""

Microbatch = list[TreeNode]
"""The trees of a microbatch, all of one temperature."""


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """All that a split depends on, except for the rows."""

    budget: int
    """The most tokens that are forwarded at once."""
    ranks: int = 1
    """Ranks, or groups of ranks, that compute microbatches of their own."""
    by_cost: bool = True
    """Whether trees are put into microbatches in the order of their costs. A device alone keeps them in the order of the step."""
    share: bool = True
    """Whether rows that begin alike share tokens."""
    least_saved: int = LEAST_SAVED
    """The fewest tokens for which sampled tokens are shared."""
    minibatches: int = 1
    """Parts of a step that are dealt one by one, because each makes an update of its own (`train.minibatches`)."""


def dealing_of(parallel: ParallelConfig, tokens: int, share: bool, minibatches: int = 1) -> Dealing:
    """The way in which rows are dealt to ranks. `tokens`: those that a rank forwards at once, as many as all others of its context. `share` and
    `minibatches`: as in `Dealing`."""
    budget, by_cost = tokens * parallel.context, parallel.ranks > 1
    return Dealing(budget=budget, ranks=parallel.batches, by_cost=by_cost, share=share, minibatches=minibatches)


@dataclass(frozen=True, kw_only=True)
class StepPaths:
    """The rows of a step, or of a minibatch of it, that have loss tokens, and the numbers that every rank needs."""

    paths: Sequence[Path]
    counts: NDArray[np.int64]
    """The loss tokens of each trajectory of the step; 0 for those that lie in other minibatches."""
    routed: Routed
    dropped_tokens: int


@dataclass(frozen=True, kw_only=True)
class DealtStep:
    """The share of one rank, or of ranks that compute together, in an optimizer step, or in a minibatch of it."""

    microbatches: Sequence[Microbatch]
    filling: int
    """Microbatches of one token without loss behind them: all ranks have the same number, because every one takes part in collectives."""
    levels: Sequence[int]
    """The least rows of each microbatch, filling ones included, where rows are forwarded one by one: the most that any rank has. Empty if rows
    share tokens."""
    counts: NDArray[np.int64]
    """The loss tokens of each trajectory of the step; 0 for those that lie in other minibatches."""
    routed: Routed
    dropped_tokens: int
    """The number for the whole step on the first rank, 0 on others; in its first minibatch that has
    rows."""
    split: bool
    """Whether a trajectory has tokens in several of the microbatches of all ranks."""


def step_paths(rows: Sequence[Row], trajectories: Sequence[Sequence[int]] = ()) -> StepPaths:
    """`trajectories`: those of each row, as numbers within the step: one for all of its tokens, or [T]. Empty: each row is one by itself."""
    own = trajectories or [(number,) for number in range(len(rows))]
    made = (path_of(row, number, of_row) for number, (row, of_row) in enumerate(zip(rows, own, strict=True)))
    paths = [path for path in made if path is not None]
    return StepPaths(
        paths=paths,
        counts=_losses_of(paths),
        routed=routed_of(rows),
        dropped_tokens=dropped(rows, sum(len(path.loss) for path in paths)),
    )


def _losses_of(paths: Sequence[Path], trajectories: int = 0) -> NDArray[np.int64]:
    """The loss tokens of each trajectory. A row that is of one has its number once: a number for each token of a step would be gigabytes."""
    numbers, tokens = [np.zeros(0, np.int32)], [np.zeros(0)]
    for path in paths:
        of_one = path.trajectory.strides == (0,)
        numbers.append(path.trajectory[:1] if of_one else path.trajectory)
        tokens.append(np.full(1, float(len(path.loss))) if of_one else np.ones(len(path.loss)))
    found: NDArray[np.int64] = np.bincount(
        np.concatenate(numbers), weights=np.concatenate(tokens), minlength=trajectories
    ).astype(np.int64)
    return found


def minibatch_of(group: int, groups: int, minibatches: int) -> int:
    """The number of the minibatch in which the group of this number lies: as many follow each other in one as in every other, where that comes out even."""
    return group * minibatches // groups


def minibatches_of(step: StepPaths, rows: Sequence[int], minibatches: int) -> list[StepPaths]:
    """The minibatches of a step. `rows`: the number of rows of each group; a group is in one minibatch with all of them."""
    if minibatches == 1:
        return [step]
    place = np.repeat([minibatch_of(group, len(rows), minibatches) for group in range(len(rows))], rows)
    found: list[StepPaths] = []
    dropped_tokens = step.dropped_tokens
    for number in range(minibatches):
        paths = [path for path in step.paths if place[path.number] == number]
        counts = _losses_of(paths, len(step.counts))
        found.append(replace(step, paths=paths, counts=counts, dropped_tokens=dropped_tokens if paths else 0))
        dropped_tokens = 0 if paths else dropped_tokens
    return found


def deal(step: StepPaths, dealing: Dealing) -> list[DealtStep]:
    """The share of every rank; together they are the whole step. They depend on the arguments alone."""

    def trees(limit: int) -> list[TreeNode]:
        return trees_of(step.paths, limit, dealing)

    hands = _balanced(trees, dealing.budget, dealing.ranks) if dealing.by_cost else [trees(dealing.budget)]
    ranks = [_microbatches(mine, dealing.budget) for mine in hands]
    most = max(map(len, ranks))
    levels = () if dealing.share else [max(_rows_at(mine, number) for mine in ranks) for number in range(most)]
    split = _splits(roots for mine in ranks for roots in mine)
    return [
        DealtStep(
            microbatches=mine,
            filling=most - len(mine),
            levels=levels,
            counts=step.counts,
            routed=step.routed,
            dropped_tokens=0 if rank else step.dropped_tokens,
            split=split,
        )
        for rank, mine in enumerate(ranks)
    ]


def _rows_at(microbatches: Sequence[Microbatch], number: int) -> int:
    """The rows of the microbatch of this number; 1 for one that fills up."""
    return len(microbatches[number]) if number < len(microbatches) else 1


def trees_of(paths: Sequence[Path], budget: int, dealing: Dealing) -> list[TreeNode]:
    """The trees of the rows, each of one temperature, and within the budget or of a single row."""
    if not dealing.share:
        return [TreeNode(path, 0, len(path.tokens), ending=[path]) for path in paths]
    temperatures = dict.fromkeys(path.temperature for path in paths)
    roots = [
        root for temperature in temperatures for root in grow(path for path in paths if path.temperature == temperature)
    ]
    prune(roots, dealing.least_saved)
    return [piece for root in roots for piece in cut(root, budget)]


def cost_of(root: TreeNode) -> int:
    """The cost of a forward pass, in pairs: every token attends to its ancestors and to the tokens before it in its own node."""
    nodes = list(preorder([root]))
    pairs = sum(node.length * node.start + node.length * (node.length + 1) // 2 for node in nodes)
    return TOKEN_COST * sum(node.length for node in nodes) + pairs


def _balanced(trees: Callable[[int], list[TreeNode]], budget: int, ranks: int) -> list[list[TreeNode]]:
    """The trees of each rank. Often the whole step is one tree (prompts share a template); smaller trees balance better and repeat
    more. A few sizes are tried, and the one is taken whose busiest rank has the least work."""
    limits = {budget}
    if ranks > 1:
        total = sum(map(size_of, trees(budget)))
        limits = {min(budget, -(-total // (ranks * parts))) or 1 for parts in (1, 2, 4)}
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


def _microbatches(trees: Sequence[TreeNode], budget: int) -> list[Microbatch]:
    """Puts trees of one temperature together, as many as the budget allows."""
    temperatures = sorted({tree.source.temperature for tree in trees})
    alike = ([tree for tree in trees if tree.source.temperature == temperature] for temperature in temperatures)
    return [found for those in alike for found in first_fit(those, size_of, budget)]


def _splits(microbatches: Iterable[Sequence[TreeNode]]) -> bool:
    """Whether two of the microbatches have tokens of one trajectory."""
    found: dict[int, int] = {}
    for number, roots in enumerate(microbatches):
        for path in (path for node in preorder(roots) for path in node.ending):
            if any(found.setdefault(mine, number) != number for mine in np.unique(path.trajectory).tolist()):
                return True
    return False
