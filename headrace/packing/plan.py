"""A batch -> packed microbatches without padding, each within a token budget.

Rows with the same prompt form a tree: the prompt is forwarded once, and every completion attends to it and to itself.

    rows      p p p a a a      p p p b b            one group: G completions of the prompt p p p
    tokens    p p p a a b                           N = 6: what no loss token is predicted from is not forwarded
    positions 0 1 2 3 4 3
    segments  (0, 3, root) (3, 2, parent 0) (5, 1, parent 0)
    predictor 2 3 4 2 5                             M = 5: logits at these places predict a a a b b

Nothing here depends on the budget but the split: weights come from the whole step (`algo/aggregate.py`, C9).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from headrace.algo.aggregate import AggregationFunction
from headrace.packing.pack import ROOT, Pack, Plan, Segment
from headrace.types import Row


@dataclass(frozen=True)
class _Leaf:
    """What a row adds to its tree."""

    row: Row
    loss: tuple[int, ...]
    """Places in `row.tokens` that are in the loss; never empty."""
    weight: float

    @property
    def forwarded(self) -> tuple[int, ...]:
        """The last loss token, and what comes after it, predicts nothing that counts."""
        return self.row.tokens[: self.loss[-1]]


@dataclass(frozen=True)
class _Tree:
    prompt: tuple[int, ...]
    leaves: tuple[_Leaf, ...]

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(len(leaf.forwarded) for leaf in self.leaves)


def pack_rows(
    rows: Sequence[Row], aggregation: AggregationFunction, constant: int, budget: int, step: int, share: bool = True
) -> Plan:
    """Split the rows of one optimizer step into packs of at most `budget` forwarded tokens.

    A tree above the budget becomes several, with the prompt repeated; a single row above it gets a pack of its own.
    Rows without a loss token are not forwarded. The result depends on the arguments alone.
    """
    for row in rows:
        assert row.prompt, "the first token of a completion is predicted from the prompt"
    losses = [loss_places(row) for row in rows]
    weights = aggregation([len(places) for places in losses], constant)
    leaves = [_Leaf(row, loss, weight) for row, loss, weight in zip(rows, losses, weights, strict=True) if loss]
    pieces = [piece for tree in _trees(leaves, share) for piece in _pieces(tree, budget)]
    dropped = sum(sum(row.mask) for row in rows) - sum(map(len, losses))
    return Plan(tuple(_pack(trees, step) for trees in _microbatches(pieces, budget)), dropped)


def pack_sequence(tokens: Sequence[int]) -> Pack:
    """One sequence whose every token but the first is scored: M = N = T - 1."""
    row = Row(tuple(tokens[:1]), tuple(tokens[1:]), *_constant_columns(len(tokens) - 1))
    return pack_rows([row], lambda counts, _: [1.0] * len(counts), 0, len(tokens), 0).packs[0]


def loss_places(row: Row) -> tuple[int, ...]:
    """Tokens of a row that are in the loss: not masked, and with a sampler's log-prob to compare with."""
    kept = enumerate(zip(row.mask, row.logprobs, strict=True))
    return tuple(i for i, (mask, logprob) in kept if mask and math.isfinite(logprob))


def _constant_columns(count: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[bool, ...], tuple[int, ...]]:
    return (0.0,) * count, (0.0,) * count, (True,) * count, (0,) * count


def _trees(leaves: Iterable[_Leaf], share_prompts: bool) -> list[_Tree]:
    if not share_prompts:
        return [_Tree(leaf.row.prompt, (leaf,)) for leaf in leaves]
    by_prompt: dict[tuple[int, ...], list[_Leaf]] = {}
    for leaf in leaves:
        by_prompt.setdefault(leaf.row.prompt, []).append(leaf)
    return [_Tree(prompt, tuple(members)) for prompt, members in by_prompt.items()]


def _pieces(tree: _Tree, budget: int) -> list[_Tree]:
    """The tree, or several with the same prompt that each fit the budget (or hold a single row)."""
    pieces: list[list[_Leaf]] = []
    room = 0
    for leaf in tree.leaves:
        if not pieces or len(leaf.forwarded) > room:
            pieces.append([])
            room = budget - len(tree.prompt)
        pieces[-1].append(leaf)
        room -= len(leaf.forwarded)
    return [_Tree(tree.prompt, tuple(piece)) for piece in pieces]


def _microbatches(pieces: Sequence[_Tree], budget: int) -> list[list[_Tree]]:
    """First fit, largest first: within 11/9 of the fewest microbatches (Johnson 1973)."""
    bins: list[tuple[int, list[_Tree]]] = []
    for piece in sorted(pieces, key=lambda tree: -tree.size):
        fits = next((i for i, (used, _) in enumerate(bins) if used + piece.size <= budget), None)
        if fits is None:
            bins.append((piece.size, [piece]))
        else:
            used, trees = bins[fits]
            bins[fits] = (used + piece.size, [*trees, piece])
    return [trees for _, trees in bins]


class _Columns:
    """The columns of a pack while it is being filled."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.predictor: list[int] = []
        self.target: list[int] = []
        self.floats: list[tuple[float, ...]] = []
        self.sequence: list[int] = []
        self.swapped: list[bool] = []

    def segment(self, tokens: Sequence[int], first_position: int, parent: int) -> Segment:
        segment = Segment(len(self.tokens), len(tokens), parent)
        self.tokens += tokens
        self.positions += range(first_position, first_position + len(tokens))
        if tokens:
            self.segments.append(segment)
        return segment

    def loss(self, leaf: _Leaf, start: int, before: int) -> None:
        """Loss tokens of a completion whose tokens lie from `start` on; the first is predicted at `before`."""
        row, number = leaf.row, self.sequence[-1] + 1 if self.sequence else 0
        swapped = len({version for version, mask in zip(row.versions, row.mask, strict=True) if mask}) > 1
        for place in leaf.loss:
            self.sequence.append(number)
            self.swapped.append(swapped)
            self.predictor.append(start + place - 1 if place else before)
            self.target.append(row.tokens[place])
            lag = self.step - row.versions[place]
            self.floats.append((row.logprobs[place], row.advantages[place], leaf.weight, lag))

    def tree(self, tree: _Tree) -> None:
        if len(tree.leaves) == 1:  # one sequence: one segment, plain causal attention
            (leaf,) = tree.leaves
            start = self.segment(tree.prompt + leaf.forwarded, 0, ROOT).start + len(tree.prompt)
            self.loss(leaf, start, start - 1)
            return
        parent = len(self.segments)
        prompt = self.segment(tree.prompt, 0, ROOT)
        for leaf in tree.leaves:
            own = self.segment(leaf.forwarded, prompt.length, parent)
            self.loss(leaf, own.start, prompt.end - 1)


def _pack(trees: Sequence[_Tree], step: int) -> Pack:
    columns = _Columns(step)
    for tree in trees:
        columns.tree(tree)
    sampled, advantage, weight, lag = torch.tensor(columns.floats, dtype=torch.float32).unbind(1)
    return Pack(
        tokens=torch.tensor(columns.tokens),
        positions=torch.tensor(columns.positions),
        segments=tuple(columns.segments),
        predictor=torch.tensor(columns.predictor),
        target=torch.tensor(columns.target),
        sampled=sampled,
        advantage=advantage,
        weight=weight,
        sequence=torch.tensor(columns.sequence),
        lag=lag,
        swapped=torch.tensor(columns.swapped),
    )
