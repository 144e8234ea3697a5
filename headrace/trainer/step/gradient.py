"""The gradient of one optimizer step: each microbatch goes through model, head and objective.

The trainer does not know which algorithm it serves: an objective is a function of per-token numbers, and the weight of every
token is fixed for the whole step before its first microbatch (C9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.algo.objective import KeptCounts
from headrace.algo.policy.pairs import PairLoss
from headrace.algo.policy.tokens import Tokens, TopTokens
from headrace.trainer.forward.forward import Forward, TokenScores
from headrace.trainer.forward.routing import Replayed, no_replay
from headrace.trainer.model.causal_lm import computed_in
from headrace.trainer.packing import Pack, PickedNumbers, StepPlan
from headrace.trainer.placement.port import Microbatches, Placement
from headrace.trainer.step.bitwise import compare
from headrace.trainer.step.learner import Learner
from headrace.trainer.step.preferring import Marks, StepPairs, prefer
from headrace.trainer.step.reference import Reference
from headrace.trainer.step.sums import Sums

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

    def _selected(self, packs: Sequence[Pack]) -> Sequence[Tensor | None]:
        """[M] bool of each pack. An algorithm that chooses among the tokens of the step sees all of them before any gradient is taken."""
        if self.learner.selection is None:
            return [None] * len(packs)
        with torch.no_grad():
            logprob = torch.cat([self._scores(pack).logprob for pack in packs])
        sampled, advantage = (torch.cat([getattr(pack, name) for pack in packs]) for name in ("sampled", "advantage"))
        (logprob, sampled, advantage), mine = self.placement.join(torch.stack([logprob, sampled, advantage]))
        keep = self.learner.selection(logprob, sampled, advantage)[mine]
        return keep.split([len(pack.target) for pack in packs])

    def _preferred(self, packs: Sequence[Pack], references: Sequence[Tensor | None]) -> Sequence[Marks | None]:
        """Returns the marks of each pack. Left to the microbatch if there is only one, whose own forward pass has all log-probs."""
        if self.pairs is None or len(packs) == 1:
            return [None] * len(packs)
        with torch.no_grad():
            logprobs = [self._scores(pack).logprob for pack in packs]
        return self._marks(packs, logprobs, references)

    def _marks(
        self, packs: Sequence[Pack], logprobs: Sequence[Tensor], references: Sequence[Tensor | None]
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

    def _referred(self, pack: Pack) -> Tensor | None:
        if self.reference is None:
            return None
        with self._precision():
            return self.reference(pack, pack.temperature or self.temperature)

    def _body(self, pack: Pack) -> Tensor:
        with self.replay(pack):
            return self.forward.hidden(pack)

    def _scores(self, pack: Pack) -> TokenScores:
        with self._precision(), self.replay(pack):
            return self.forward.logprobs(pack, pack.temperature or self.temperature, self.dtype)

    @contextmanager
    def _microbatch(
        self, pack: Pack, keep: Tensor | None, reference: Tensor | None, marks: Marks | None
    ) -> Iterator[Tensor]:
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


def _tokens(pack: Pack, scores: TokenScores, reference: Tensor | None, keep: Tensor | None) -> Tokens:
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
