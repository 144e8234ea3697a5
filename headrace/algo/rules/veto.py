"""Sequences that another policy would have sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from headrace.algo.policy.tokens import Tokens, ratio_of, sequence_sum
from headrace.algo.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Veto(Rule):
    """Takes out sequences in which a token's ratio is below this (1e-4 is usual); 0 is off."""

    name: ClassVar[str] = "veto"
    threshold: Annotated[float, Field(ge=0, lt=1)]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        unlikely = ratio_of(x, tokens.sampled) < self.threshold
        return sequence_sum(unlikely.to(x.dtype), tokens.sequence) > 0
