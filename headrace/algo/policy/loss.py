"""The base of all policy losses: a frozen value that holds its constants, and a formula. Imports no torch: settings are read without it.

A loss is a subclass of `Loss` with its constants as fields. Its docstring is the formula with its source, and the choice made where
implementations differ; the line beneath a field says what the constant does. `[algo]` has a setting for every constant, with the
bounds of the annotation; docs/settings.md and docs/algorithms.md print the docstrings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.algo.policy.tokens import TokenLoss, Tokens

LossFunction = Callable[["Tokens", "Tensor"], "TokenLoss"]
"""(tokens, old [M]) -> TokenLoss"""

STRICT = ConfigDict(extra="forbid")


@dataclasses.dataclass(frozen=True)
class Loss:
    """Properties say what settings, warnings and the report have to know about a loss; most losses keep the defaults."""

    name: ClassVar[str]
    """The value of `algo.loss`."""
    holds: ClassVar[bool] = True
    """The policy is kept near the one that sampled, by a bound on the ratio between them or by a pull."""
    needs_gap: ClassVar[bool] = False
    """Only the gap to the sampler makes it hold the policy, so `algo.old = trainer`, without a gap, is refused."""
    cuts: ClassVar[tuple[str, ...]] = ()
    """Constants that are bounds beyond which a token loses its gradient; a bound that only holds a weight is none of them."""
    of_sequence: ClassVar[bool] = False
    """The bounds apply to the mean over a sequence."""
    selection: ClassVar[str] = ""
    """The `algo.select.kind` without which it cannot work."""
    weighs_rollouts: ClassVar[bool] = False
    """The advantage is the weight of a rollout, and rollouts of weight zero leave the loss and its denominator."""
    anchored: ClassVar[bool] = True
    """It is a function of `old`. (A function of the user's gets the tokens alone.)"""
    rejects: ClassVar[bool] = False
    """It may take tokens out by a rule of its own."""

    def __call__(self, tokens: Tokens, old: Tensor) -> TokenLoss:
        """`old` [M] (no gradient): what the ratio r = exp(logprob - old) is anchored at (`objective.old_of`)."""
        raise NotImplementedError

    def ready(self) -> LossFunction:
        """The function that the trainer calls on every microbatch. Raises ConfigError where it cannot be loaded."""
        return self

    def problems(self) -> Iterator[str]:
        """Constants that cannot work, each with its remedy."""
        yield from ()

    def log_bounds(self) -> tuple[float, float] | None:
        """What the log ratio is bounded by; None where no bound on it takes a gradient away."""
        return None

    def words(self) -> Iterator[str]:
        """The constants for people."""
        for name, value in self.constants().items():
            yield f"{name} = {value:.6g}"

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """Names of its constants."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def constants(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.reads()}

    def __str__(self) -> str:
        return self.name
