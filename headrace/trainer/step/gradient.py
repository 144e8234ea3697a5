"""The gradient of one optimizer step: microbatch after microbatch through model, head and objective.

The trainer does not know which algorithm it serves: an objective is a function of per-token numbers, and the weight of every
token is fixed for the whole step before its first microbatch (C9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.algo.loss.denominator import Kept
from headrace.algo.loss.diagnostics import Diagnostics
from headrace.algo.loss.kl import kl_estimate
from headrace.algo.policy.tokens import TokenLoss, Tokens, TopTokens, k3, ratio_of
from headrace.packing import Pack
from headrace.trainer.forward.forward import Forward, Scores
from headrace.trainer.forward.routing import Replayed, no_replay
from headrace.trainer.step.bitwise import compare
from headrace.trainer.step.learner import Learner
from headrace.trainer.step.reference import Reference

Replay = Callable[[Pack], AbstractContextManager[Replayed]]
"""Forces the recorded experts of a pack while it is forwarded (and backwarded)."""


SHOWN_KL = 10.0
"""The most that one token adds to the mean of the report, which one absurd token would else be all of. No loss knows it."""


@dataclass
class Sums:
    """Over the loss tokens of a step."""

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
    """Tokens that teach nothing: taken out by a rule, stopped by the loss's bound, or of no advantage."""
    cut: int = 0
    """Those of the first two kinds."""
    outside: int = 0
    missing_routes: int = 0
    bitwise: int = 0
    """Tokens whose log-probs were compared with the sampler's and are equal."""
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    def add(self, pack: Pack, tokens: Tokens, scores: Scores, result: TokenLoss) -> None:
        logprob = tokens.logprob.detach()
        if not len(logprob):  # a pack that fills up a rank
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

    @property
    def all_cut(self) -> bool:
        """Whether bounds and rules left nothing of the policy loss."""
        return self.cut > 0 and self.idle == self.tokens


@dataclass
class Gradient:
    """What the microbatches of a step share."""

    forward: Forward
    learner: Learner
    temperature: float
    dtype: torch.dtype
    """Of the computation."""
    reference: Reference | None = None
    replay: Replay = no_replay
    bitwise: bool = False
    """Log-probs of tokens at lag 0 must be the sampler's (`bitwise.py`)."""
    sums: Sums = field(default_factory=Sums)
    kept: Kept | None = field(init=False)
    """Where what is rejected leaves the denominator."""

    def __post_init__(self) -> None:
        algo = self.learner.algo
        self.kept = Kept(algo.recipe.aggregation) if algo.denominator == "kept" else None

    def of(self, packs: Sequence[Pack], device: torch.device) -> Sums:
        """Fills the parameters' gradients, summed over the step's microbatches."""
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            # One context for the step: weights are lowered once, not once a microbatch.
            on_device = [pack.to(device) for pack in packs]
            for pack, keep in zip(on_device, self._selected(on_device), strict=True):
                self._microbatch(pack, keep)
        if self.kept:
            self._make_up_for(self.kept.factor)
        return self.sums

    def _make_up_for(self, factor: float) -> None:
        """The denominator that was not known before."""
        for parameter in self.learner.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.sums.loss *= factor

    def _selected(self, packs: Sequence[Pack]) -> Iterator[Tensor | None]:
        """Where the algorithm chooses among the tokens of the whole step, it sees all of them before any gradient is taken."""
        if self.learner.selection is None:
            return iter([None] * len(packs))
        with torch.no_grad():
            logprob = torch.cat([self._scores(pack).logprob for pack in packs])
        sampled, advantage = (torch.cat([getattr(pack, name) for pack in packs]) for name in ("sampled", "advantage"))
        keep = self.learner.selection(logprob, sampled, advantage)
        return iter(keep.split([len(pack.target) for pack in packs]))

    def _scores(self, pack: Pack) -> Scores:
        with self.replay(pack):
            return self.forward.logprobs(pack, self.temperature, self.dtype)

    def _microbatch(self, pack: Pack, keep: Tensor | None) -> None:
        reference = self.reference(pack, self.temperature) if self.reference else None
        with self.replay(pack) as replayed:
            scores = self.forward.logprobs(pack, self.temperature, self.dtype)
            if self.bitwise:
                self.sums.bitwise += compare(pack, scores.logprob, self.learner.version)
            tokens = _tokens(pack, scores, reference, keep)
            result = self.learner.objective(tokens)
            if self.kept:
                pack = replace(pack, weight=pack.weight * self.kept.within_rows(tokens.sequence, result.rejected))
            (result.loss * pack.weight).sum().backward()
        self.sums.missing_routes += replayed.missing
        self.sums.add(pack, tokens, scores, result)


def _tokens(pack: Pack, scores: Scores, reference: Tensor | None, keep: Tensor | None) -> Tokens:
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
