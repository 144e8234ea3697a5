"""The numbers of a step that its report is made of, as sums over loss tokens: microbatches and ranks add up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.algo.diagnostics import Diagnostics
from headrace.algo.objective import COUNTS, KeptCounts, kl_estimate
from headrace.algo.policy.tokens import TokenLoss, Tokens, k3, ratio_of
from headrace.trainer.forward.forward import TokenScores
from headrace.trainer.packing import Pack, StepPlan
from headrace.trainer.placement.port import Placement
from headrace.trainer.step.preferring import PairNumbers

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
