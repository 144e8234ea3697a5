"""The gradient of one optimizer step: each microbatch goes through model, head and objective.

The trainer does not know which algorithm it serves: an objective is a function of per-token numbers, and the weight of every
token is fixed for the whole step before its first microbatch (C9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headrace.algo.diagnostics import Diagnostics
from headrace.algo.objective import COUNTS, KeptCounts, kl_estimate, with_bonus
from headrace.algo.policy.pairs import PairLoss
from headrace.algo.policy.tokens import TokenLoss, Tokens, TopTokens, k3, ratio_of
from headrace.core.reports import CriticNumbers
from headrace.trainer.forward.forward import Forward, TokenScores
from headrace.trainer.forward.routing import Replayed, no_replay
from headrace.trainer.model.causal_lm import computed_in
from headrace.trainer.packing import Pack, PickedNumbers, StepPlan
from headrace.trainer.placement.port import Microbatches, Placement
from headrace.trainer.step.bitwise import compare
from headrace.trainer.step.learner import Learner
from headrace.trainer.step.reference import Reference
from headrace.trainer.step.value_head import JudgedPack
from headrace.trainer.step.whole_step import PairNumbers, StepPairs, StepPart, numbers_of, parts_of

if TYPE_CHECKING:
    from jaxtyping import Float


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
    critic: CriticNumbers | None = None
    """The critic's numbers, the same on all ranks; None without one."""

    def count(self, plan: StepPlan) -> None:
        self.forward_tokens += sum(len(pack.tokens) for pack in plan.packs)
        self.microbatches += len(plan.packs)
        self.dropped_tokens += plan.dropped_tokens
        self.routing_conflicts += plan.routing_conflicts

    def add(self, pack: Pack, tokens: Tokens, scores: TokenScores, result: TokenLoss) -> None:
        """`pack.weight` and `tokens.advantage` are those that the loss was computed with."""
        logprob = tokens.logprob.detach()
        if not len(logprob):  # a pack that only fills up a rank
            return
        ratio = ratio_of(logprob, tokens.sampled)
        self.tokens += len(logprob)
        self.loss += float((result.loss.detach() * pack.weight).sum())
        self.entropy += float(scores.entropy.detach().sum())
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


_ADDED = [name for name in Sums.__dataclass_fields__ if name not in ("ratio_max", "diagnostics", "pairs", "critic")]


# --- gradient ------------------------------------------------------------


Replay = Callable[[Pack], AbstractContextManager[Replayed]]
"""Forces the recorded experts of a pack while it is forwarded (and backwarded)."""


class Ahead(NamedTuple):
    """The part of a microbatch in numbers of the whole step that are known before it is forwarded for its gradient; None where its own pass gives them."""

    judged: JudgedPack | None = None
    part: StepPart | None = None


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
    copies: Callable[[], AbstractContextManager[None]] = nullcontext
    """Open while the model computes: weights are then those that autocast would lower for every microbatch (`forward/lowered.py`)."""
    pairs: StepPairs | None = None
    """The preferences of the step, if the loss is one of pairs."""
    bitwise: bool = False
    """Log-probs of tokens at lag 0 must be the sampler's (`bitwise.py`)."""
    sums: Sums = field(default_factory=Sums)
    picked: PickedNumbers | None = None
    """Collects numbers of single tokens for the report."""
    kept: KeptCounts | None = None
    """Counts over the microbatches, where rejected tokens leave the denominator; else None."""

    def fill(self, plan: StepPlan) -> Sums:
        """Adds the gradient of the whole step, over all microbatches and ranks, to the parameters' `.grad`. Returns its sums."""
        with self.copies():
            self._accumulate(plan)
        self.sums.combine(self.placement, self.kept)
        if self.picked:
            self.picked.combine(self.placement.sum)
        if self.kept:
            self._make_up_for(self.kept.factor)
        return self.sums

    def _accumulate(self, plan: StepPlan) -> None:
        packs = [pack.to(self.device) for pack in plan.packs]
        references = [self._referred(pack) for pack in packs]
        reach = self.learner.reach
        # what is kept is then known in advance: the critic's part of the gradient has a denominator of its own
        kept = self.learner.critic is not None and self.learner.algo.denominator == "kept"
        at_once = reach == "step" or kept or (reach == "sequence" and plan.split)
        ahead = self._ahead(packs, references, at_once)
        self.kept = None if at_once else self._counts()
        self.sums.count(plan)
        work = Microbatches(
            packs=packs,
            loss=lambda number: self._microbatch(packs[number], references[number], ahead[number], at_once),
            body=lambda number: self._body(packs[number]),
            precision=self._precision,
            parameters=self.learner.trained,
        )
        self.placement.accumulate(work)

    def _precision(self) -> AbstractContextManager[None]:
        return computed_in(self.dtype, self.device)

    def _make_up_for(self, factor: float) -> None:
        """Applies the final denominator to gradient and loss, which was not known during the microbatches."""
        for parameter in self.learner.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.sums.loss *= factor

    def _counts(self) -> KeptCounts | None:
        algo = self.learner.algo
        return KeptCounts(algo.recipe.aggregation) if algo.denominator == "kept" else None

    def _ahead(
        self, packs: Sequence[Pack], references: Sequence[Float[Tensor, " _"] | None], at_once: bool
    ) -> Sequence[Ahead]:
        """Returns what the packs need to know of the whole step: their parts in a loss that is computed on it at once, and what the critic found.
        Left to the microbatch if there is only one, whose own forward pass has all numbers."""
        if len(packs) == 1 or not (at_once or self.learner.critic):
            return [Ahead()] * len(packs)
        with torch.no_grad():
            scores = [self._scores(pack) for pack in packs]
        judged = self._judged(packs, scores)
        packs = [_advised(pack, own) for pack, own in zip(packs, judged, strict=True)]
        if not at_once:
            return [Ahead(own) for own in judged]
        tokens = [_tokens(*one) for one in zip(packs, scores, references, strict=True)]
        return [Ahead(*one) for one in zip(judged, self._step_parts(packs, tokens), strict=True)]

    def _judged(self, packs: Sequence[Pack], scores: Sequence[TokenScores]) -> Sequence[JudgedPack | None]:
        critic = self.learner.critic
        if critic is None:
            return [None] * len(packs)
        values = [score.value for score in scores if score.value is not None]
        found, self.sums.critic = critic.judged(packs, values, self.placement)
        return found

    def _step_parts(self, packs: Sequence[Pack], tokens: Sequence[Tokens]) -> Sequence[StepPart]:
        algo = self.learner.algo
        parts, step = parts_of(
            self.learner.objective,
            packs,
            tokens,
            placement=self.placement,
            kept=self._counts(),
            pairs=self.pairs,
            top=algo.teacher_top,
        )
        if isinstance(algo.recipe.loss, PairLoss):
            self.sums.pairs = numbers_of(algo.recipe.loss, step)
        return parts

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
            return self._forwarded(pack)

    def _forwarded(self, pack: Pack) -> TokenScores:
        given = (pack, pack.temperature or self.temperature, self.dtype)
        critic = self.learner.critic
        return self.forward.logprobs(*given, critic) if critic else self.forward.logprobs(*given)

    @contextmanager
    def _microbatch(
        self, pack: Pack, reference: Float[Tensor, " M"] | None, ahead: Ahead, at_once: bool
    ) -> Iterator[Float[Tensor, ""]]:
        """Yields the loss. The recorded experts stay forced during its backward pass: checkpointed layers are forwarded again in it."""
        with self.replay(pack) as replayed:
            scores = self._forwarded(pack)
            if self.bitwise:
                self.sums.bitwise += compare(pack, scores.logprob, self.learner.version)
            judged = ahead.judged or self._judged([pack], [scores])[0]
            pack = _advised(pack, judged)
            tokens, algo, part = _tokens(pack, scores, reference), self.learner.algo, ahead.part
            if at_once:
                part = part or self._step_parts([pack], [tokens])[0]
                result, pack = part.of(tokens), replace(pack, weight=part.weight)
            else:
                result = self.learner.objective(tokens)
            result = with_bonus(tokens, result, self.learner.entropy.now, algo.denominator == "kept")
            if self.kept:
                factors = self.kept.within_sequences(tokens.sequence, result.rejected)
                pack = replace(pack, weight=pack.weight * factors)
            if self.pairs and part:  # what pushes a token is its slope
                tokens = tokens._replace(advantage=-part.slopes["logprob"])
            loss = (result.loss * pack.weight).sum()
            if self.learner.critic and judged and scores.value is not None:
                loss = self.learner.critic.loss(loss, tokens, scores.value, judged)
            yield loss
        self.sums.missing_routes += replayed.missing
        self.sums.add(pack, tokens, scores, result)
        if self.picked:
            self.picked.add(pack, scores.logprob, scores.entropy)


def _advised(pack: Pack, judged: JudgedPack | None) -> Pack:
    """The pack with the critic's advantages in the place of rewards."""
    return pack if judged is None else replace(pack, advantage=judged.advantage)


def _tokens(pack: Pack, scores: TokenScores, reference: Float[Tensor, " M"] | None) -> Tokens:
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
        entropy=scores.entropy,
    )
