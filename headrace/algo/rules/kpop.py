"""Tokens on which the two policies diverge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from headrace.algo.policy.tokens import Tokens, binary_kl
from headrace.algo.rules.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KPop(Rule):
    """Takes out tokens for which the larger of the two binary divergences is above this; 0 is off.

    AReaL takes out tokens above 2, prime-rl above 0.1. Choice: 2.
    """

    name: ClassVar[str] = "kpop"
    threshold: Annotated[float, Field(ge=0)]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        return larger_binary_kl(x, tokens.sampled) > self.threshold


def larger_binary_kl(x: Tensor, sampled: Tensor) -> Tensor:
    """[M] the larger of both divergences between "this token" and "any other" under either policy."""
    return binary_kl(x, sampled).maximum(binary_kl(sampled, x))
