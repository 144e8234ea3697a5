"""Off-policy sequence masking."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from headrace.algo.policy.tokens import Tokens, sequence_mean
from headrace.algo.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OPSM(Rule):
    """Takes out tokens of negative advantage in sequences whose mean of sampler's - trainer's log-prob is above this; 0 is off.

    DeepSeek-V3.2 (arXiv 2512.02556): a mistake that the policy would hardly make any more need not be unlearned.
    """

    name: ClassVar[str] = "opsm"
    of_sequence: ClassVar[bool] = True
    threshold: Annotated[float, Field(ge=0)]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        drift = sequence_mean(tokens.sampled - x, tokens.sequence)
        return (tokens.advantage < 0) & (drift > self.threshold)

    def log_bounds(self) -> tuple[float, float]:
        return -self.threshold, math.inf
