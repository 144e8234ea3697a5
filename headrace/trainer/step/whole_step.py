"""The objective on all tokens of an optimizer step at once, where the loss of a token depends on tokens of other microbatches: losses of
pairs, selections, bounds for the whole step, and sequences (trajectories) whose rows lie in several microbatches or on several ranks.

    numbers of all tokens (log-probs, ...)  ->  the objective in float64  ->  the loss of each token, and the derivative of the
                                                                              step's loss by each of its numbers
                                            ->  the microbatches: a loss with that value and that derivative

The gradients of the microbatches then add up to that of the step, however it is split (C9). A step of several microbatches costs a forward
pass without gradient for that; a step of one microbatch does not, and neither does one whose objective stays within its microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.algo.objective import KeptCounts, Objective
from headrace.algo.policy.pairs import PairLoss
from headrace.algo.policy.tokens import TokenLoss, Tokens, TopTokens
from headrace.trainer.dealing.share import StepHead
from headrace.trainer.packing import Pack
from headrace.trainer.placement.port import Placement

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class StepPairs:
    """The pairs of an optimizer step, as trajectories of it."""

    chosen: Int[Tensor, " K"]
    rejected: Int[Tensor, " K"]
    """[K] int64"""


class PairNumbers(NamedTuple):
    """The pairs of a step in numbers, for its report."""

    pairs: int = 0
    agreed: float = 0.0
    """Share of the pairs whose margin is positive: the policy prefers what was preferred."""
    margin: float = 0.0
    """Mean of `PairLoss.margin`."""


class StepPart(NamedTuple):
    """The part of the step's loss that falls on the M tokens of a microbatch, without gradient."""

    result: TokenLoss
    weight: Float[Tensor, " M"]
    """[M] the weight of each token's loss, final."""
    slopes: dict[str, Tensor]
    """Column of `Tokens` -> [M] the derivative of the step's loss by it, divided by the weight. `top`: [M, k], by `top.student`."""

    def of(self, tokens: Tokens) -> TokenLoss:
        """The loss of these tokens: its value is that of the result, and its derivatives are the slopes."""
        loss = self.result.loss
        for name, column in _variables(tokens).items():
            if name in self.slopes:
                moved = column - column.detach()
                slope = self.slopes[name]
                loss = loss + (slope * moved if slope.dim() == 1 else (slope[:, : moved.shape[1]] * moved).sum(1))
        return self.result._replace(loss=loss)


def pairs_of(head: StepHead, minibatch: int = 0) -> StepPairs:
    found = np.frombuffer(head.pairs[minibatch], np.int64).reshape(-1, 2).copy()
    chosen, rejected = torch.from_numpy(found).T
    return StepPairs(chosen, rejected)


def parts_of(
    objective: Objective,
    packs: Sequence[Pack],
    tokens: Sequence[Tokens],
    *,
    placement: Placement,
    kept: KeptCounts | None,
    pairs: StepPairs | None = None,
    top: int = 0,
) -> tuple[list[StepPart], Tokens]:
    """Returns the parts of this rank's microbatches, from their tokens, and the tokens of the step. Every rank calls it.

    `kept`: counts what a rule takes out, if it leaves the denominator. `top`: the number of the teacher's most probable tokens.
    """
    columns = torch.cat([_columns(pack, part, top) for pack, part in zip(packs, tokens, strict=True)], 1)
    joined, mine = placement.join(columns)
    whole, weight = _step_tokens(
        joined.cpu().double(), tokens[0], top, pairs
    )  # a sum on CUDA differs from call to call (C8)
    variables = {name: column.requires_grad_() for name, column in _variables(whole).items()}
    result = objective(whole)
    if kept is not None:
        weight = weight * kept.within_sequences(whole.sequence, result.rejected) * kept.factor
    total = (result.loss * weight).sum()
    found = torch.autograd.grad(total, list(variables.values()), allow_unused=True)
    part = StepPart(
        result._replace(loss=result.loss.detach()),
        weight,
        {
            name: slope / (weight[:, None] if slope.dim() > 1 else weight)
            for name, slope in zip(variables, found, strict=True)
            if slope is not None
        },
    )
    return _parted(part, mine, [len(pack.target) for pack in packs], columns), whole


def numbers_of(loss: PairLoss, tokens: Tokens) -> PairNumbers:
    """`tokens`: those of the step."""
    found = loss.compared(tokens)
    margins = loss.margin(found.better, found.worse).detach()
    if not len(margins):
        return PairNumbers()
    return PairNumbers(len(margins), float((margins > 0).double().mean()), float(margins.mean()))


def _variables(tokens: Tokens) -> dict[str, Tensor]:
    """The columns that have a gradient."""
    given = {"logprob": tokens.logprob, "entropy": tokens.entropy, "divergence": tokens.divergence}
    given["top"] = tokens.top.student if tokens.top else None
    return {name: column for name, column in given.items() if column is not None}


_OPTIONAL = ("reference", "teacher", "before", "divergence")


def _columns(pack: Pack, tokens: Tokens, top: int) -> Float[Tensor, "c M"]:
    """[c, M] in the dtype of the log-probs. Trajectories are whole numbers, below 2^24."""
    given = [tokens.logprob, tokens.sampled, tokens.advantage, pack.trajectory, tokens.lag, pack.weight]
    given += [torch.full_like(tokens.sampled, torch.nan) if tokens.entropy is None else tokens.entropy]
    none = torch.full_like(tokens.sampled, torch.nan)
    given += [none if (column := getattr(tokens, name)) is None else column for name in _OPTIONAL]
    columns = torch.stack([column.detach().to(tokens.logprob.dtype) for column in given])
    if not top:
        return columns
    student, teacher = columns.new_zeros(top, len(none)), columns.new_full((top, len(none)), -torch.inf)
    if tokens.top is not None:
        student[: tokens.top.student.shape[1]] = tokens.top.student.detach().T
        teacher[: tokens.top.teacher.shape[1]] = tokens.top.teacher.T
    return torch.cat([columns, student, teacher])


def _step_tokens(
    columns: Float[Tensor, "c M"], like: Tokens, top: int, pairs: StepPairs | None
) -> tuple[Tokens, Float[Tensor, " M"]]:
    """Returns the tokens of the step, and their weights as they were packed. `like`: tokens with the same optional columns."""
    logprob, sampled, advantage, trajectory, lag, weight, entropy, *optional = columns[: 7 + len(_OPTIONAL)]
    number = trajectory.long()
    rest = columns[7 + len(_OPTIONAL) :]
    tokens = Tokens(
        logprob=logprob.clone(),
        sampled=sampled,
        advantage=advantage,
        sequence=number if pairs else number.unique(return_inverse=True)[1],
        lag=lag,
        reference=optional[0] if like.reference is not None else None,
        teacher=optional[1] if like.teacher is not None or optional[1].isfinite().any() else None,
        before=optional[2] if like.before is not None else None,
        divergence=optional[3].clone() if like.divergence is not None else None,
        top=TopTokens(rest[:top].T.clone(), rest[top:].T) if top and rest[top:].isfinite().any() else None,
        entropy=None if like.entropy is None else entropy.clone(),
        pairs=(pairs.chosen, pairs.rejected) if pairs else None,
    )
    return tokens, weight


def _parted(part: StepPart, mine: slice, counts: Sequence[int], like: Tensor) -> list[StepPart]:
    """Returns the parts of this rank's microbatches, with the dtype and device of `like`."""

    def split(column: Tensor) -> Sequence[Tensor]:
        taken = column[mine].to(like.device)
        return (taken.to(like.dtype) if taken.is_floating_point() else taken).split(list(counts))

    loss, clipped, weight = split(part.result.loss), split(part.result.clipped), split(part.weight)
    masked: dict[str, Sequence[Bool[Tensor, " M"]]] = {rule: split(taken) for rule, taken in part.result.masked.items()}
    slopes = {name: split(slope) for name, slope in part.slopes.items()}
    return [
        StepPart(
            TokenLoss(loss[i], clipped[i], {rule: taken[i] for rule, taken in masked.items()}),
            weight[i],
            {name: slope[i] for name, slope in slopes.items()},
        )
        for i in range(len(counts))
    ]
