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
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headrace.algo.aggregate import AggregationFunction
from headrace.types import Row

ROOT = -1
"""The `parent` of a segment that starts a sequence."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a pack that see each other causally, and all of their parent segment."""

    start: int
    length: int
    parent: int = ROOT

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Pack:
    """One microbatch: N forwarded tokens, M tokens in the loss."""

    tokens: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64: place in the token's own sequence."""
    segments: tuple[Segment, ...]
    """A tree's segments follow each other: the prompt, then its completions."""
    predictor: Tensor
    """[M] int64: where in the pack the logits lie that predict the loss token."""
    target: Tensor
    """[M] int64: the loss token."""
    old_logprob: Tensor
    """[M] float32: the sampler's."""
    advantage: Tensor
    """[M] float32"""
    weight: Tensor
    """[M] float32: the loss of the step is the sum over all packs of weight · token loss."""

    def to(self, device: torch.device) -> Pack:
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "segments"}
        return replace(self, **moved)


@dataclass(frozen=True)
class Plan:
    """An optimizer step, split into microbatches."""

    packs: tuple[Pack, ...]
    dropped_tokens: int
    """Tokens that would be in the loss but have a non-finite sampler log-prob."""


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
    rows: Sequence[Row], aggregation: AggregationFunction, constant: int, budget: int, share_prompts: bool = True
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
    pieces = [piece for tree in _trees(leaves, share_prompts) for piece in _pieces(tree, budget)]
    dropped = sum(sum(row.mask) for row in rows) - sum(map(len, losses))
    return Plan(tuple(_pack(trees) for trees in _microbatches(pieces, budget)), dropped)


def pack_sequence(tokens: Sequence[int]) -> Pack:
    """One sequence whose every token but the first is scored: M = N = T - 1."""
    row = Row(tuple(tokens[:1]), tuple(tokens[1:]), *_constant_columns(len(tokens) - 1))
    return pack_rows([row], lambda counts, _: [1.0] * len(counts), 0, len(tokens)).packs[0]


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

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.predictor: list[int] = []
        self.target: list[int] = []
        self.floats: list[tuple[float, float, float]] = []

    def segment(self, tokens: Sequence[int], first_position: int, parent: int) -> Segment:
        segment = Segment(len(self.tokens), len(tokens), parent)
        self.tokens += tokens
        self.positions += range(first_position, first_position + len(tokens))
        if tokens:
            self.segments.append(segment)
        return segment

    def loss(self, leaf: _Leaf, start: int, before: int) -> None:
        """Loss tokens of a completion whose tokens lie from `start` on; the first is predicted at `before`."""
        for place in leaf.loss:
            self.predictor.append(start + place - 1 if place else before)
            self.target.append(leaf.row.tokens[place])
            self.floats.append((leaf.row.logprobs[place], leaf.row.advantages[place], leaf.weight))

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


def _pack(trees: Sequence[_Tree]) -> Pack:
    columns = _Columns()
    for tree in trees:
        columns.tree(tree)
    floats = torch.tensor(columns.floats, dtype=torch.float32)
    return Pack(
        torch.tensor(columns.tokens),
        torch.tensor(columns.positions),
        tuple(columns.segments),
        torch.tensor(columns.predictor),
        torch.tensor(columns.target),
        *floats.unbind(1),
    )
