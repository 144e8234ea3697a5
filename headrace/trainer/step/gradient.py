"""The gradient of one optimizer step: each microbatch goes through model, head and objective.

The trainer does not know which algorithm it serves: an objective is a function of per-token numbers, and the weight of every
token is fixed for the whole step before its first microbatch (C9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headrace.algo.diagnostics import Diagnostics
from headrace.algo.objective import COUNTS, KeptCounts, kl_estimate
from headrace.algo.policy.pairs import PairLoss, Side
from headrace.algo.policy.tokens import TokenLoss, Tokens, TopTokens, k3, ratio_of
from headrace.algo.training_rows import paths_of
from headrace.core.batches import Batch
from headrace.trainer.forward.forward import Forward, TokenScores
from headrace.trainer.forward.routing import Replayed, no_replay
from headrace.trainer.model.causal_lm import computed_in
from headrace.trainer.packing import Pack, PickedNumbers, StepPlan
from headrace.trainer.placement.port import Microbatches, Placement
from headrace.trainer.step.bitwise import compare
from headrace.trainer.step.learner import Learner
from headrace.trainer.step.reference import Reference

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


# --- The loss of preferences, over the pairs of a whole optimizer step.
#
#     log-probs of all tokens  ->  log-likelihoods of rollouts [S]  ->  loss of the K pairs  ->  its derivative by each log-likelihood
#                                                                                           ->  the advantage of that rollout's tokens
#
# The derivative of the step's loss by every log-prob is then known before a gradient is taken, so that the gradient of the microbatches adds up
# to that of the pairs, exactly, whether or not both rollouts of a pair lie in one microbatch or on one rank (C9). A step of several
# microbatches costs a forward pass without gradient for that; a step of one microbatch does not.


@dataclass(frozen=True)
class StepPairs:
    """The pairs of an optimizer step."""

    rollouts: Int[Tensor, " R"]
    """[R] int64: which rollout of the step each row belongs to. A rollout has several rows where its episode has several paths."""
    chosen: Int[Tensor, " K"]
    rejected: Int[Tensor, " K"]
    """[K] int64: rollouts of the step."""


class Marks(NamedTuple):
    """The part of the pairs' loss that falls on the tokens of a microbatch."""

    slope: Float[Tensor, " M"]
    """[M] the derivative of the step's loss by the token's log-prob."""
    share: Float[Tensor, " M"]
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
    logprobs: Sequence[Float[Tensor, " _"]],
    references: Sequence[Float[Tensor, " _"] | None],
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
    loss: PairLoss,
    pairs: StepPairs,
    logprob: Float[Tensor, " M"],
    row: Int[Tensor, " M"],
    reference: Float[Tensor, " M"] | None,
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


# --- The numbers of a step that its report is made of, as sums over loss tokens
# Microbatches and ranks add up.


SHOWN_KL = 10.0
"""The most that one token adds to the reported mean, which a single absurd token would dominate otherwise. No loss uses it."""


@dataclass(kw_only=True)
class Sums:
    tokens: int = 0
    loss: float = 0.0
    """Already weighted: the loss of the step."""
    entropy: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    reference_kl: float = 0.0
    teacher_kl: float = 0.0
    taught: int = 0
    """Tokens that a teacher scored."""
    idle: int = 0
    """Tokens that teach nothing: taken out by a rule, stopped by the loss's bound, or without an advantage."""
    cut: int = 0
    """Idle tokens of the first two kinds."""
    outside: int = 0
    """Tokens outside their sampling mask."""
    missing_routes: int = 0
    bitwise: int = 0
    """Tokens whose log-probs were compared with the sampler's and are equal."""
    forward_tokens: int = 0
    microbatches: int = 0
    dropped_tokens: int = 0
    """Tokens without a finite sampler log-prob."""
    routing_conflicts: int = 0
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    pairs: PairNumbers = PairNumbers()
    """Numbers of the whole step, the same on all ranks."""

    def count(self, plan: StepPlan) -> None:
        self.forward_tokens += sum(len(pack.tokens) for pack in plan.packs)
        self.microbatches += len(plan.packs)
        self.dropped_tokens += plan.dropped_tokens
        self.routing_conflicts += plan.routing_conflicts

    def add(self, pack: Pack, tokens: Tokens, scores: TokenScores, result: TokenLoss) -> None:
        logprob = tokens.logprob.detach()
        if not len(logprob):  # a pack that only fills up a rank
            return
        ratio = ratio_of(logprob, tokens.sampled)
        self.tokens += len(logprob)
        self.loss += float((result.loss.detach() * pack.weight).sum())
        self.entropy += float(scores.entropy.sum())
        self.ratio += float(ratio.sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        self.clipped += int(result.clipped.sum())
        pushing = tokens.advantage != 0
        cut = result.rejected | (result.clipped & pushing)
        self.cut += int(cut.sum())
        self.idle += int((cut | ~pushing).sum())
        self.kl += float(k3(logprob, tokens.sampled).sum())
        self.outside += scores.outside
        if tokens.reference is not None:
            self.reference_kl += float(kl_estimate(logprob, tokens.reference, "k3").clamp(max=SHOWN_KL).sum())
        if tokens.teacher is not None:
            known = tokens.teacher.isfinite()
            self.teacher_kl += float((logprob - tokens.teacher)[known].sum())
            self.taught += int(known.sum())
        self.diagnostics.add(tokens, result, pack.swapped)

    def combine(self, placement: Placement, kept: KeptCounts | None) -> None:
        """Replaces the sums of this rank by those of all ranks, and those of `kept`. Exact: counts below 2^53 are float64 numbers."""
        places: list[tuple[Any, str]] = [(self, name) for name in _ADDED]
        places += [(kept, name) for name in COUNTS if kept]
        given = [getattr(owner, name) for owner, name in places]
        added = placement.sum(torch.tensor(given, dtype=torch.float64)).tolist()
        for (owner, name), old, new in zip(places, given, added, strict=True):
            setattr(owner, name, type(old)(new))
        self.ratio_max = float(placement.largest(torch.tensor([self.ratio_max], dtype=torch.float64)))
        self.diagnostics.combine(placement.sum, placement.largest)

    @property
    def all_cut(self) -> bool:
        """Whether bounds and rules left nothing of the policy loss."""
        return self.cut > 0 and self.idle == self.tokens


_ADDED = [name for name in Sums.__dataclass_fields__ if name not in ("ratio_max", "diagnostics", "pairs")]


# --- gradient ------------------------------------------------------------


Replay = Callable[[Pack], AbstractContextManager[Replayed]]
"""Forces the recorded experts of a pack while it is forwarded (and backwarded)."""


@dataclass(kw_only=True)
class Gradient:
    """The state that the microbatches of a step share."""

    forward: Forward
    learner: Learner
    placement: Placement
    temperature: float
    """The temperature of rows that do not say theirs."""
    dtype: torch.dtype
    """The dtype of the computation."""
    device: torch.device
    reference: Reference | None = None
    replay: Replay = no_replay
    pairs: StepPairs | None = None
    """The preferences of the step, if the loss is one of pairs."""
    bitwise: bool = False
    """Log-probs of tokens at lag 0 must be the sampler's (`bitwise.py`)."""
    sums: Sums = field(default_factory=Sums)
    picked: PickedNumbers | None = None
    """Collects numbers of single tokens for the report."""
    kept: KeptCounts | None = field(init=False)
    """Counts, where rejected tokens leave the denominator; else None."""

    def __post_init__(self) -> None:
        algo = self.learner.algo
        self.kept = KeptCounts(algo.recipe.aggregation) if algo.denominator == "kept" else None

    def fill(self, plan: StepPlan) -> Sums:
        """Adds the gradient of the whole step, over all microbatches and ranks, to the parameters' `.grad`. Returns its sums."""
        packs = [pack.to(self.device) for pack in plan.packs]
        references = [self._referred(pack) for pack in packs]
        keep, marks = self._selected(packs), self._preferred(packs, references)
        self.sums.count(plan)
        work = Microbatches(
            packs=packs,
            loss=lambda number: self._microbatch(packs[number], keep[number], references[number], marks[number]),
            body=lambda number: self._body(packs[number]),
            precision=self._precision,
            parameters=list(self.learner.parameters.values()),
        )
        self.placement.accumulate(work)
        self.sums.combine(self.placement, self.kept)
        if self.picked:
            self.picked.combine(self.placement.sum)
        if self.kept:
            self._make_up_for(self.kept.factor)
        return self.sums

    def _precision(self) -> AbstractContextManager[None]:
        return computed_in(self.dtype, self.device)

    def _make_up_for(self, factor: float) -> None:
        """Applies the final denominator to gradient and loss, which was not known during the microbatches."""
        for parameter in self.learner.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.sums.loss *= factor

    def _selected(self, packs: Sequence[Pack]) -> Sequence[Bool[Tensor, " _"] | None]:
        """[M] bool of each pack. An algorithm that chooses among the tokens of the step sees all of them before any gradient is taken."""
        if self.learner.selection is None:
            return [None] * len(packs)
        with torch.no_grad():
            logprob = torch.cat([self._scores(pack).logprob for pack in packs])
        sampled, advantage = (torch.cat([getattr(pack, name) for pack in packs]) for name in ("sampled", "advantage"))
        (logprob, sampled, advantage), mine = self.placement.join(torch.stack([logprob, sampled, advantage]))
        keep = self.learner.selection(logprob, sampled, advantage)[mine]
        return keep.split([len(pack.target) for pack in packs])

    def _preferred(
        self, packs: Sequence[Pack], references: Sequence[Float[Tensor, " _"] | None]
    ) -> Sequence[Marks | None]:
        """Returns the marks of each pack. Left to the microbatch if there is only one, whose own forward pass has all log-probs."""
        if self.pairs is None or len(packs) == 1:
            return [None] * len(packs)
        with torch.no_grad():
            logprobs = [self._scores(pack).logprob for pack in packs]
        return self._marks(packs, logprobs, references)

    def _marks(
        self,
        packs: Sequence[Pack],
        logprobs: Sequence[Float[Tensor, " _"]],
        references: Sequence[Float[Tensor, " _"] | None],
    ) -> list[Marks]:
        assert self.pairs and isinstance(self.learner.algo.recipe.loss, PairLoss)
        marks, self.sums.pairs = prefer(
            self.learner.algo.recipe.loss,
            self.pairs,
            packs,
            logprobs=logprobs,
            references=references,
            placement=self.placement,
        )
        return marks

    def _referred(self, pack: Pack) -> Float[Tensor, " M"] | None:
        if self.reference is None:
            return None
        with self._precision():
            return self.reference(pack, pack.temperature or self.temperature)

    def _body(self, pack: Pack) -> Float[Tensor, "N H"]:
        with self.replay(pack):
            return self.forward.hidden(pack)

    def _scores(self, pack: Pack) -> TokenScores:
        with self._precision(), self.replay(pack):
            return self.forward.logprobs(pack, pack.temperature or self.temperature, self.dtype)

    @contextmanager
    def _microbatch(
        self, pack: Pack, keep: Bool[Tensor, " M"] | None, reference: Float[Tensor, " M"] | None, marks: Marks | None
    ) -> Iterator[Float[Tensor, ""]]:
        """Yields the loss. The recorded experts stay forced during its backward pass: checkpointed layers are forwarded again in it."""
        with self.replay(pack) as replayed:
            scores = self.forward.logprobs(pack, pack.temperature or self.temperature, self.dtype)
            if self.bitwise:
                self.sums.bitwise += compare(pack, scores.logprob, self.learner.version)
            tokens = _tokens(pack, scores, reference, keep)
            if self.pairs:
                marks = marks or self._marks([pack], [scores.logprob], [reference])[0]
                tokens = tokens._replace(advantage=-marks.slope, share=marks.share)
            result = self.learner.objective(tokens)
            if self.kept:
                pack = replace(pack, weight=pack.weight * self.kept.within_rows(tokens.sequence, result.rejected))
            yield (result.loss * pack.weight).sum()
        self.sums.missing_routes += replayed.missing
        self.sums.add(pack, tokens, scores, result)
        if self.picked:
            self.picked.add(pack, scores.logprob, scores.entropy)


def _tokens(
    pack: Pack, scores: TokenScores, reference: Float[Tensor, " M"] | None, keep: Bool[Tensor, " M"] | None
) -> Tokens:
    top = None
    if scores.top is not None and pack.top_logprobs is not None:
        top = TopTokens(scores.top, pack.top_logprobs)
    return Tokens(
        logprob=scores.logprob,
        sampled=pack.sampled,
        advantage=pack.advantage,
        sequence=pack.sequence,
        lag=pack.lag,
        reference=reference,
        teacher=pack.teacher,
        top=top,
        keep=keep,
    )
