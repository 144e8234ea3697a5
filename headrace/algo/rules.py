"""Rules by which a correction takes tokens out. Imports no torch: settings are read without it.

A rule is a subclass of `Rule`, and a line in `_ALL`. The first paragraph of its docstring is the purpose of its setting,
`algo.correction.<name>`, in docs/settings.md; the annotation of `threshold` has the setting's bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar, get_type_hints

from pydantic import Field

from headrace.algo.policy.loss import Reach, optional
from headrace.algo.policy.tokens import Tokens, binary_kl, ratio_of, sequence_mean, sequence_sum

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True)
class Rule:
    name: ClassVar[str]
    """The setting in `[algo.correction]`, and the name under which its tokens are counted."""
    of_sequence: ClassVar[bool] = False
    """Whether the threshold applies to the mean over a sequence."""
    reach: ClassVar[Reach] = "token"
    """The tokens that decide about one."""
    threshold: float

    def __call__(self, x: Float[Tensor, " M"], tokens: Tokens) -> Bool[Tensor, " M"]:
        """[M] bool: the tokens that are taken out. `x` [M], without gradient: the log-prob whose gap to the sampler's counts."""
        raise NotImplementedError

    def log_bounds(self) -> tuple[float, float] | None:
        """The bounds on the log ratio that rounding alone may cross; None if they lie far outside it."""
        return None


# --- Tokens on which the two policies diverge.


@dataclass(frozen=True)
class KPop(Rule):
    """Takes out tokens for which the larger of the two binary divergences is above this; 0 is off.

    AReaL takes out tokens above 2, prime-rl above 0.1. Choice: 2.
    """

    name: ClassVar[str] = "kpop"
    threshold: Annotated[float, Field(ge=0)]

    def __call__(self, x: Float[Tensor, " M"], tokens: Tokens) -> Bool[Tensor, " M"]:
        return larger_binary_kl(x, tokens.sampled) > self.threshold


def larger_binary_kl(x: Float[Tensor, " M"], sampled: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """[M] the larger of both divergences between "this token" and "any other" under either policy."""
    return binary_kl(x, sampled).maximum(binary_kl(sampled, x))


# --- Off-policy sequence masking.


@dataclass(frozen=True)
class OPSM(Rule):
    """Takes out tokens of negative advantage in sequences whose mean of sampler's - trainer's log-prob is above this; 0 is off.

    DeepSeek-V3.2 (arXiv 2512.02556): a mistake that the policy would hardly make any more need not be unlearned.
    """

    name: ClassVar[str] = "opsm"
    of_sequence: ClassVar[bool] = True
    reach: ClassVar[Reach] = "sequence"
    threshold: Annotated[float, Field(ge=0)]

    def __call__(self, x: Float[Tensor, " M"], tokens: Tokens) -> Bool[Tensor, " M"]:
        drift = sequence_mean(tokens.sampled - x, tokens.sequence)
        return (tokens.advantage < 0) & (drift > self.threshold)

    def log_bounds(self) -> tuple[float, float]:
        return -self.threshold, math.inf


# --- Sequences that another policy would have sampled.


@dataclass(frozen=True)
class Veto(Rule):
    """Takes out sequences in which a token's ratio is below this (1e-4 is usual); 0 is off."""

    name: ClassVar[str] = "veto"
    reach: ClassVar[Reach] = "sequence"
    threshold: Annotated[float, Field(ge=0, lt=1)]

    def __call__(self, x: Float[Tensor, " M"], tokens: Tokens) -> Bool[Tensor, " M"]:
        unlikely = ratio_of(x, tokens.sampled) < self.threshold
        return sequence_sum(unlikely.to(x.dtype), tokens.sequence) > 0


# --- The table of rules, and their settings. To add a rule, add its class to `_ALL`.


C = TypeVar("C", bound=type)

_ALL: tuple[type[Rule], ...] = (Veto, KPop, OPSM)

RULES = {rule.name: rule for rule in _ALL}
"""Setting -> rule, in the order in which they are applied."""


def with_thresholds(cls: C) -> C:
    """Decorates a class that becomes a dataclass: the threshold of every rule is an optional setting behind its own."""
    for name, rule in RULES.items():
        cls.__annotations__[name] = optional(get_type_hints(rule, include_extras=True)["threshold"])
        setattr(cls, name, None)
    return cls
