"""The loss of preferences, over the pairs of a whole optimizer step.

    log-probs of all tokens  ->  log-likelihoods of rollouts [S]  ->  loss of the K pairs  ->  its derivative by each log-likelihood
                                                                                          ->  the advantage of that rollout's tokens

The derivative of the step's loss by every log-prob is then known before a gradient is taken, so that the gradient of the microbatches adds up
to that of the pairs, exactly, whether or not both rollouts of a pair lie in one microbatch or on one rank (C9). A step of several
microbatches costs a forward pass without gradient for that; a step of one microbatch does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.algo.policy.pairs import PairLoss, Side
from headrace.algo.training_rows import paths_of
from headrace.core.batches import Batch
from headrace.trainer.packing import Pack
from headrace.trainer.placement.port import Placement


@dataclass(frozen=True)
class StepPairs:
    """The pairs of an optimizer step."""

    rollouts: Tensor
    """[R] int64: which rollout of the step each row belongs to. A rollout has several rows where its episode has several paths."""
    chosen: Tensor
    rejected: Tensor
    """[K] int64: rollouts of the step."""


class Marks(NamedTuple):
    """The part of the pairs' loss that falls on the tokens of a microbatch."""

    slope: Tensor
    """[M] the derivative of the step's loss by the token's log-prob."""
    share: Tensor
    """[M] the token's share of the step's loss."""


class PairNumbers(NamedTuple):
    """The pairs of a step in numbers, for its report."""

    pairs: int = 0
    agreed: float = 0.0
    """Share of the pairs whose margin is positive: the policy prefers what was preferred."""
    margin: float = 0.0
    """Mean of `PairLoss.margin`."""


def pairs_of(batch: Batch) -> StepPairs:
    rollouts: list[int] = []
    pairs: list[tuple[int, int]] = []
    first = 0
    for group in batch.groups:
        rollouts += [first + place for place, one in enumerate(group.scored) for _ in paths_of(one.episode)]
        pairs += [(first + chosen, first + rejected) for chosen, rejected in group.pairs]
        first += len(group.scored)
    assert len(rollouts) == len(batch.rows), "a row for every path of every rollout"
    chosen, rejected = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    return StepPairs(torch.tensor(rollouts, dtype=torch.int64), chosen, rejected)


def prefer(
    loss: PairLoss,
    pairs: StepPairs,
    packs: Sequence[Pack],
    *,
    logprobs: Sequence[Tensor],
    references: Sequence[Tensor | None],
    placement: Placement,
) -> tuple[list[Marks], PairNumbers]:
    """Returns the marks of this rank's microbatches, from the log-probs [M] of their tokens. Every rank calls it."""
    columns = [torch.cat([one.detach() for one in logprobs]), torch.cat([pack.row for pack in packs])]
    columns += [torch.cat([one for one in references if one is not None])] if loss.needs_reference else []
    step, mine = placement.join(
        torch.stack([column.float() for column in columns])
    )  # rows are whole numbers below 2^24
    step = step.cpu().double()  # a sum on CUDA differs from call to call (C8)
    marks, numbers = _marks(loss, pairs, step[0], step[1].long(), step[2] if loss.needs_reference else None)
    counts, device = [len(pack.target) for pack in packs], logprobs[0].device
    slopes, shares = (column[mine].float().to(device).split(counts) for column in marks)
    return [Marks(*both) for both in zip(slopes, shares, strict=True)], numbers


def _marks(
    loss: PairLoss, pairs: StepPairs, logprob: Tensor, row: Tensor, reference: Tensor | None
) -> tuple[Marks, PairNumbers]:
    """Makes the marks of all tokens of the step, [M_step]."""
    rollout, count = pairs.rollouts[row], int(pairs.rollouts.max()) + 1 if len(pairs.rollouts) else 0
    sums = lambda values: torch.zeros(count, dtype=torch.float64).index_add_(0, rollout, values)  # noqa: E731
    tokens = sums(torch.ones_like(logprob))
    there = (tokens[pairs.chosen] > 0) & (
        tokens[pairs.rejected] > 0
    )  # a sampler's log-prob that is not finite takes a token out
    chosen, rejected = pairs.chosen[there], pairs.rejected[there]
    likelihood = sums(logprob).requires_grad_()
    referred = None if reference is None else sums(reference)
    sides = [
        Side(likelihood[one], None if referred is None else referred[one], tokens[one]) for one in (chosen, rejected)
    ]
    if not len(chosen):
        zeros = torch.zeros_like(logprob)
        return Marks(zeros, zeros), PairNumbers()
    losses = loss.of_pairs(*sides)
    (slope,) = torch.autograd.grad(losses.mean(), likelihood)
    half = (losses.detach() / (2 * len(losses))).repeat(2)
    shares = torch.zeros(count, dtype=torch.float64).index_add_(0, torch.cat([chosen, rejected]), half)
    margins = loss.margin(*sides).detach()
    numbers = PairNumbers(len(losses), float((margins > 0).double().mean()), float(margins.mean()))
    return Marks(slope[rollout], (shares / tokens.clamp(min=1))[rollout]), numbers
