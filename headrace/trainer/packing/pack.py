"""A microbatch: the columns that the trainer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from headrace.algo.objective import AggregationFunction
from headrace.core.batches import Row
from headrace.trainer.dealing.deal import DealtStep

ROOT = -1
"""The `parent` of a segment that starts a sequence."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a pack that see each other causally, and all of their ancestors: parent, its parent, ..."""

    start: int
    length: int
    parent: int = ROOT

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Kept:
    """The ids that the sampler could choose from at each of M places: compressed by rows, or a set that several places may share."""

    ids: Tensor
    """[nnz] int64, ascending in each row"""
    offsets: Tensor
    """[M + 1] int64: place m holds ids[offsets[m]:offsets[m + 1]]; an empty row without a set means the whole vocabulary."""
    sets: Tensor | None = None
    """[D, W] uint8: the different sets as bits, the lowest bit of a byte first; ids behind 8 · W are in none of them. None if there are none."""
    set_of: Tensor | None = None
    """[M] int64: the set of each place, -1 for none. The row of a place that has one is empty."""

    def to(self, device: torch.device) -> Kept:
        given = (self.ids, self.offsets, self.sets, self.set_of)
        return Kept(*(None if tensor is None else tensor.to(device) for tensor in given))  # type: ignore[arg-type]

    def rows(self, start: int, end: int) -> Kept:
        """The part for the places start:end."""
        offsets = self.offsets[start : end + 1]
        own = None if self.set_of is None else self.set_of[start:end]
        return Kept(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0], self.sets, own)

    def chosen(self, places: Tensor) -> Kept:
        """The part for these places, an index [m]."""
        counts = self.offsets.diff()[places]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        source = torch.repeat_interleave(self.offsets[places] - offsets[:-1], counts)
        ids = self.ids[source + torch.arange(len(source), device=source.device)]
        return Kept(ids, offsets, self.sets, None if self.set_of is None else self.set_of[places])

    def below(self, rows: int) -> Kept:
        """Returns these sets without ids from `rows` on."""
        there = self.ids < rows
        counts = torch.zeros_like(self.offsets)
        counts[1:] = torch.cat([there.new_zeros(1, dtype=torch.int64), there.cumsum(0)])[self.offsets].diff()
        return Kept(self.ids[there], counts.cumsum(0), self.sets, self.set_of)

    def padded(self, count: int) -> Kept:
        """Returns these sets with `count` more places, each with the whole vocabulary."""
        own = None if self.set_of is None else torch.cat([self.set_of, self.set_of.new_full((count,), -1)])
        return Kept(self.ids, torch.cat([self.offsets, self.offsets[-1:].expand(count)]), self.sets, own)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One microbatch: N forwarded tokens, M tokens in the loss. Loss tokens of a row follow each other; rows are whole."""

    tokens: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64: place in the token's own sequence."""
    segments: tuple[Segment, ...]
    """Trees in preorder: a segment, then all that descends from it."""
    predictor: Tensor
    """[M] int64: the place in the pack whose logits predict the loss token."""
    target: Tensor
    """[M] int64: the loss token."""
    sampled: Tensor
    """[M] float32: the sampler's log-prob."""
    advantage: Tensor
    """[M] float32"""
    weight: Tensor
    """[M] float32: the loss of the step is the sum over all packs of weight · token loss."""
    sequence: Tensor
    """[M] int64: which of the pack's trajectories, from 0 on. Those of several rows may be anywhere among the others."""
    trajectory: Tensor
    """[M] int64: which trajectory of the step."""
    turn: Tensor
    """[M] int64: the order of a trajectory's turns (`Row.turns`). The tokens of a turn follow each other."""
    row: Tensor
    """[M] int64: which row of the step."""
    lag: Tensor
    """[M] float32: optimizer steps between the weights that sampled the token and those being trained."""
    apart: Tensor
    """[M] int8: whether the token counts with those of its lag (`row_paths.Path.apart`)."""
    unmixed: Tensor
    """[M] bool: sampled over cache entries of the token's own version alone."""
    kept: Kept | None = None
    """[M] the ids that a constraint, top-k, top-p or min-p left; None where the whole vocabulary was left everywhere."""
    routing: Tensor | None = None
    """[N, layers, k] int16: the experts that the sampler chose; -1 where they were not recorded."""
    teacher: Tensor | None = None
    """[M] float32: the teacher's log-prob of the loss token; NaN where there is none."""
    top_ids: Tensor | None = None
    """[M, k] int64: the teacher's most probable tokens."""
    top_logprobs: Tensor | None = None
    """[M, k] float32: their log-probs; -inf pads (the id is then 0)."""
    temperature: float = 0.0
    """The temperature of all its rows; 0: that of their batch."""

    def to(self, device: torch.device) -> Pack:
        columns: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("segments", "temperature")
        }
        return replace(self, **{name: x.to(device) for name, x in columns.items() if x is not None})


@dataclass(frozen=True)
class StepRows:
    """The rows of an optimizer step, and all that their split into microbatches depends on."""

    rows: Sequence[Row]
    aggregation: AggregationFunction
    _: KW_ONLY
    constant: int
    """The denominator of aggregations by a constant length."""
    budget: int
    """The most tokens that are forwarded at once."""
    step: int
    share: bool = True
    """Whether rows that begin alike share tokens."""
    trajectories: Sequence[Sequence[int]] = ()
    """The trajectories of each row, as numbers within the step: one for all of its tokens, or [T]. Empty: each row is one by itself."""


@dataclass(frozen=True)
class DealtRows:
    """The share of one rank in an optimizer step, and all that its microbatches depend on."""

    dealt: DealtStep
    aggregation: AggregationFunction
    _: KW_ONLY
    constant: int
    """The denominator of aggregations by a constant length."""
    step: int


@dataclass(frozen=True)
class StepPlan:
    """An optimizer step, split into microbatches."""

    packs: tuple[Pack, ...]
    dropped_tokens: int
    """Tokens that would be in the loss but have a non-finite sampler log-prob."""
    routing_conflicts: int = 0
    """Prompt tokens that two rows share with different recorded experts. Those of the first row are used."""
    split: bool = False
    """Whether a trajectory has tokens in several packs of the step, those of all ranks included."""
