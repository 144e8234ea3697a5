"""The gradient of one update: each microbatch goes through model, head and objective.

The trainer does not know which algorithm it serves: an objective is a function of per-token numbers, and the weight of every
token is fixed for the whole update before its first microbatch (C9). A step makes one update, or several (`train.epochs`, `train.minibatches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headrace.algo.diagnostics import Diagnostics
from headrace.algo.objective import COUNTS, KeptCounts, Objective, demonstrated, kl_estimate, with_bonus
from headrace.algo.policy.pairs import PairLoss
from headrace.algo.policy.tokens import TokenLoss, Tokens, TopTokens, k3, ratio_of
from headrace.core.reports import CriticNumbers
from headrace.trainer.dealing.share import StepHead
from headrace.trainer.forward.forward import Forward, TokenScores
from headrace.trainer.forward.routing import Replayed, no_replay
from headrace.trainer.model.causal_lm import computed_in
from headrace.trainer.packing import Pack, PickedNumbers, StepPlan
from headrace.trainer.placement.port import Microbatches, Placement
from headrace.trainer.step.bitwise import compare
from headrace.trainer.step.learner import Learner, Update
from headrace.trainer.step.reference import Reference
from headrace.trainer.step.teacher import HeldTeacher
from headrace.trainer.step.value_head import JudgedPack, ValueHead
from headrace.trainer.step.whole_step import PairNumbers, StepPairs, StepPart, numbers_of, pairs_of, parts_of

if TYPE_CHECKING:
    from jaxtyping import Float


# --- The numbers of an update that the step's report is made of, as sums over loss tokens
# Microbatches and ranks add up.


SHOWN_KL = 10.0
"""The most that one token adds to the reported mean, which `algo.kl.target` goes by: a single absurd token would dominate it otherwise. No loss is bounded by it."""


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
    divergence: float = 0.0
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
    passes: int = 1
    """The number of updates in which each token was: all counts of tokens but `bitwise` are so many times those of the step."""
    logprob: float = 0.0
    given: int = 0
    """Tokens of demonstrations, which are in nothing else here but the loss and what was forwarded."""
    given_logprob: float = 0.0
    given_share: float = 0.0
    """The share of the loss that is theirs."""

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
        self.logprob += float(logprob.sum())
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
        if tokens.divergence is not None:
            self.divergence += float(tokens.divergence.detach().sum())
        self.diagnostics.add(tokens, result, pack.apart)

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

    def join(self, later: Sequence[Sums], passes: int) -> None:
        """Adds the sums of the step's later updates. The loss becomes their mean."""
        updates = [self, *later]
        pairs = sum(one.pairs.pairs for one in updates)
        if pairs:
            agreed, margin = (
                sum(getattr(one.pairs, name) * one.pairs.pairs for one in updates) / pairs
                for name in ("agreed", "margin")
            )
            self.pairs = PairNumbers(pairs // passes, agreed, margin)
        for name in _ADDED:
            setattr(self, name, sum(getattr(one, name) for one in updates))
        self.loss /= len(updates)
        self.ratio_max = max(one.ratio_max for one in updates)
        for one in later:
            self.diagnostics.join(one.diagnostics)
        self.passes = passes

    def mix(self, given: Sums, share: float) -> None:
        """Takes the sums of the demonstrations of the same update, which have so large a share of its loss."""
        self.loss = (1 - share) * self.loss + share * given.loss
        self.given, self.given_logprob, self.given_share = given.tokens, given.logprob, share
        self.forward_tokens += given.forward_tokens
        self.microbatches += given.microbatches

    @property
    def all_cut(self) -> bool:
        """Whether bounds and rules left nothing of the policy loss."""
        return self.cut > 0 and self.idle == self.tokens


_ADDED = [
    name
    for name in Sums.__dataclass_fields__
    if name not in ("ratio_max", "diagnostics", "pairs", "critic", "passes", "given_share")
]


# --- gradient ------------------------------------------------------------


Replay = Callable[[Pack], AbstractContextManager[Replayed]]
"""Forces the recorded experts of a pack while it is forwarded (and backwarded)."""


class Ahead(NamedTuple):
    """The numbers of a microbatch that are known before it is forwarded for its gradient; None where there are none, or its own pass gives them."""

    reference: Float[Tensor, " M"] | None = None
    """[M] log-probs of the reference model"""
    before: Float[Tensor, " M"] | None = None
    """[M] log-probs of the weights that the step began with"""
    judged: JudgedPack | None = None
    part: StepPart | None = None
    """The part of this microbatch in a loss that is computed on all of them at once."""


class Minibatch(NamedTuple):
    """The microbatches of an update, and what stays the same in every update that they make (`train.epochs`)."""

    plan: StepPlan
    packs: Sequence[Pack]
    ahead: Sequence[Ahead]


@dataclass(kw_only=True)
class Gradient:
    """The state that the microbatches of an update share."""

    forward: Forward
    learner: Learner
    placement: Placement
    temperature: float
    """The temperature of rows that do not say theirs."""
    dtype: torch.dtype
    """The dtype of the computation."""
    device: torch.device
    reference: Reference | None = None
    teacher: HeldTeacher | None = None
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
    given: Objective | None = None
    """The loss of demonstrations, if the microbatches are those; it takes the place of all that the algorithm makes of rollouts."""

    @property
    def critic(self) -> ValueHead | None:
        return None if self.given else self.learner.critic

    @property
    def trained(self) -> Sequence[torch.nn.Parameter]:
        return list(self.learner.parameters.values()) if self.given else self.learner.trained

    def minibatches(self, plans: Sequence[StepPlan]) -> list[Minibatch]:
        """Returns the minibatches of a step that makes several updates. Every rank calls it, before the first update: what old log-probs and
        advantages follow from is computed under the weights that the step begins with, in a pass without gradient."""
        anchored = self.learner.algo.recipe.old != "sampler"
        with self.copies(), torch.no_grad():
            made = [self._minibatch(plan) for plan in plans]
            if not anchored and self.critic is None:
                return made
            packs = [pack for one in made for pack in one.packs]
            scores = [self._scores(pack) for pack in packs]
        places = [place for place, one in enumerate(made) for _ in one.packs]
        judged = iter(self._judged(packs, scores, places))
        before = iter([score.logprob if anchored else None for score in scores])
        return [
            one._replace(ahead=[own._replace(before=next(before), judged=next(judged)) for own in one.ahead])
            for one in made
        ]

    def _minibatch(self, plan: StepPlan) -> Minibatch:
        packs = [pack.to(self.device) for pack in plan.packs]
        return Minibatch(plan, packs, [Ahead(self._referred(pack)) for pack in packs])

    def fill(self, given: StepPlan | Minibatch) -> Sums:
        """Adds the gradient of an update, over all microbatches and ranks, to the parameters' `.grad`. Returns its sums."""
        with self.copies():
            self._accumulate(given if isinstance(given, Minibatch) else self._minibatch(given))
        self.sums.combine(self.placement, self.kept)
        if self.picked:
            self.picked.combine(self.placement.sum)
        if self.kept:
            self._make_up_for(self.kept.factor)
        return self.sums

    def _accumulate(self, minibatch: Minibatch) -> None:
        plan, packs = minibatch.plan, minibatch.packs
        reach = "token" if self.given else self.learner.reach
        # what is kept is then known in advance: the critic's part of the gradient has a denominator of its own
        kept = self.critic is not None and self.learner.algo.denominator == "kept"
        at_once = reach == "step" or kept or (reach == "sequence" and plan.split)
        ahead = self._ahead(minibatch, at_once)
        self.kept = None if at_once else self._counts()
        self.sums.count(plan)
        work = Microbatches(
            packs=packs,
            loss=lambda number: self._microbatch(packs[number], ahead[number], at_once),
            body=lambda number: self._body(packs[number]),
            precision=self._precision,
            parameters=self.trained,
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
        return KeptCounts(algo.recipe.aggregation) if algo.denominator == "kept" and not self.given else None

    def _ahead(self, minibatch: Minibatch, at_once: bool) -> Sequence[Ahead]:
        """Returns what the packs need to know of all of them: their parts in a loss that is computed on these at once, and what the critic found.
        Left to the microbatch if there is only one, whose own forward pass has all numbers."""
        packs, ahead = minibatch.packs, minibatch.ahead
        unjudged = self.critic is not None and ahead[0].judged is None
        if len(packs) == 1 or not (at_once or unjudged):
            return ahead
        with torch.no_grad():
            scores = [self._scores(pack, taught=at_once) for pack in packs]
        if unjudged:
            judged = self._judged(packs, scores)
            ahead = [own._replace(judged=found) for own, found in zip(ahead, judged, strict=True)]
        if not at_once:
            return ahead
        packs = [_advised(pack, own.judged) for pack, own in zip(packs, ahead, strict=True)]
        tokens = [_tokens(*one) for one in zip(packs, scores, ahead, strict=True)]
        parts = self._step_parts(packs, tokens)
        return [own._replace(part=part) for own, part in zip(ahead, parts, strict=True)]

    def _judged(
        self, packs: Sequence[Pack], scores: Sequence[TokenScores], minibatches: Sequence[int] = ()
    ) -> Sequence[JudgedPack | None]:
        critic = self.critic
        if critic is None:
            return [None] * len(packs)
        values = [score.value for score in scores if score.value is not None]
        found, self.sums.critic = critic.judged(packs, values, self.placement, minibatches)
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

    def _scores(self, pack: Pack, taught: bool = False) -> TokenScores:
        with self._precision(), self.replay(pack):
            return self._forwarded(pack, taught)

    def _forwarded(self, pack: Pack, taught: bool = True) -> TokenScores:
        """`taught`: whether the teacher is asked, too."""
        given = (pack, pack.temperature or self.temperature, self.dtype)
        lesson = self.teacher.lesson(pack) if self.teacher and taught else None
        critic = self.critic
        if critic:
            return critic.scored(self.forward, *given, lesson=lesson)
        return self.forward.logprobs(*given, lesson=lesson)

    @contextmanager
    def _microbatch(self, pack: Pack, ahead: Ahead, at_once: bool) -> Iterator[Float[Tensor, ""]]:
        """Yields the loss. The recorded experts stay forced during its backward pass: checkpointed layers are forwarded again in it."""
        with self.replay(pack) as replayed:
            scores = self._forwarded(pack)
            if self.bitwise:
                self.sums.bitwise += compare(pack, scores.logprob, self.learner.version)
            judged = ahead.judged or self._judged([pack], [scores])[0]
            pack = _advised(pack, judged)
            tokens, algo, part = _tokens(pack, scores, ahead), self.learner.algo, ahead.part
            if self.teacher and algo.teaches_alone:  # spares a backward pass of zeros through the head
                tokens = tokens._replace(logprob=tokens.logprob.detach())
            if at_once:
                part = part or self._step_parts([pack], [tokens])[0]
                result, pack = part.of(tokens), replace(pack, weight=part.weight)
            else:
                result = (self.given or self.learner.objective)(tokens)
            if not self.given:
                result = with_bonus(tokens, result, self.learner.entropy.now, algo.denominator == "kept")
            if self.kept:
                factors = self.kept.within_sequences(tokens.sequence, result.rejected)
                pack = replace(pack, weight=pack.weight * factors)
            if self.pairs and part:  # what pushes a token is its slope
                tokens = tokens._replace(advantage=-part.slopes["logprob"])
            loss = (result.loss * pack.weight).sum()
            if self.critic and judged and scores.value is not None:
                loss = self.critic.loss(loss, tokens, scores.value, judged)
            yield loss
        self.sums.missing_routes += replayed.missing
        self.sums.add(pack, tokens, scores, result)
        if self.picked:
            self.picked.add(pack, scores.logprob, scores.entropy)


def _advised(pack: Pack, judged: JudgedPack | None) -> Pack:
    """The pack with the critic's advantages in the place of rewards."""
    return pack if judged is None else replace(pack, advantage=judged.advantage)


def _tokens(pack: Pack, scores: TokenScores, ahead: Ahead) -> Tokens:
    top = None
    if scores.top is not None and pack.top_logprobs is not None:
        top = TopTokens(scores.top, pack.top_logprobs)
    return Tokens(
        logprob=scores.logprob,
        sampled=pack.sampled,
        advantage=pack.advantage,
        sequence=pack.sequence,
        lag=pack.lag,
        reference=ahead.reference,
        teacher=pack.teacher if scores.taught.teacher is None else scores.taught.teacher,
        top=top,
        divergence=scores.taught.divergence,
        entropy=scores.entropy,
        before=ahead.before,
    )


# --- The updates of a step


def _mix(gradient: Gradient, sums: Sums, plan: StepPlan, step: int) -> None:
    """Makes (1 - μ)·g + μ·d of the gradient g of an update, d being that of its demonstrations. It is computed apart, because placements add ranks' gradients up where
    they lie: one more gradient is held meanwhile. Where they are compared with rollouts, μ is their share of all tokens, so that it is the mean over these."""
    rule = gradient.learner.algo.recipe.demonstrations
    share = rule.share_at(step)
    if rule.kind == "compared":
        given = sum(len(pack.target) for pack in plan.packs)
        tokens = float(gradient.placement.sum(torch.tensor([given], dtype=torch.float64)))
        share = tokens / (tokens + sums.tokens)
    if not share:
        return
    parameters = list(gradient.learner.parameters.values())
    aside = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    nothing: dict[str, Any] = dict.fromkeys(("picked", "pairs", "reference", "teacher"))
    found = replace(gradient, given=demonstrated(rule, share), sums=Sums(), bitwise=False, **nothing).fill(plan)
    for parameter, own in zip(parameters, aside, strict=True):
        if parameter.grad is not None:
            parameter.grad.mul_(share)
        if own is not None:
            own.mul_(1 - share)
            parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
    sums.mix(found, share)


def make_updates(
    gradient: Gradient, plans: Mapping[int, StepPlan], batch: StepHead, lr: float, given: Sequence[StepPlan] = ()
) -> tuple[Sums, list[Update]]:
    """Makes the updates of a step: each minibatch makes one, one after the other, in each of `train.epochs` passes. Returns the sums over all of them.

    `gradient`: that of the first one. `plans`: by the number of the minibatch; each has packs. `given`: the demonstrations beside each minibatch, if
    there are any. Steps of a critic alone leave them out.

    Choice: minibatches are those of the step's groups in their order, and the same in every pass. PPO's first implementation draws them anew; groups
    are independent draws already, and a replay needs no generator (C8).
    """
    learner, critic = gradient.learner, gradient.sums
    epochs, paired = learner.config.epochs, learner.algo.recipe.loss.pairs
    ready: Mapping[int, StepPlan | Minibatch] = plans
    if epochs * len(plans) > 1:
        ready = dict(zip(plans, gradient.minibatches(list(plans.values())), strict=True))
    found: list[Sums] = []
    updates: list[Update] = []
    for number in [*ready] * epochs:
        gradient.pairs = pairs_of(batch, number) if paired else None
        sums = gradient.fill(ready[number])
        if given and not learner.trains_critic_alone:
            _mix(gradient, sums, given[number], batch.step)
        loss = sums.loss + (critic.critic.value_loss if critic.critic else 0.0)
        updates.append(learner.update(batch.step, loss, lr, unless_zero=sums.all_cut and batch.skippable))
        found.append(sums)
        # log-probs of tokens, and their equality with the sampler's, are those before the step
        gradient = replace(gradient, sums=Sums(), picked=None, bitwise=False)
    if found[1:]:
        found[0].join(found[1:], epochs)
    return found[0], updates
