"""The base of all policy losses: a frozen value that holds its constants, and a formula. Imports no torch, so that
settings can be read without it.

A loss is a subclass of `Loss` with its constants as fields. Its docstring gives the formula with its source, and the
choice made where implementations differ; the docstring beneath a field says what the constant does. `[algo]` has a
setting for every constant, with the bounds of the annotation; docs/settings.md and docs/algorithms.md print the
docstrings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from headrace.algo.policy.tokens import TokenLoss, Tokens


C = TypeVar("C", bound=type)

ClipLow = Annotated[float, Field(gt=0, le=1)]
ClipHigh = Annotated[float, Field(gt=0)]
Tau = Annotated[float, Field(gt=0)]
Delta = Annotated[float, Field(gt=0, le=1)]
Cap = Annotated[float, Field(gt=0)]
Penalty = Annotated[float, Field(ge=0)]

Reach = Literal["token", "sequence", "step"]
"""The tokens that the loss of a token depends on: itself, those of its sequence, or all of the optimizer step."""


def settings_of(losses: Iterable[type[Loss]], before: str) -> Callable[[C], C]:
    """Decorates a class that becomes a dataclass: adds every constant of the losses as an optional setting, before the
    field `before`."""
    constants: dict[str, Any] = {}
    for loss in losses:
        hints = get_type_hints(loss, include_extras=True)
        for name in loss.reads():
            same = constants.setdefault(name, hints[name]) == hints[name]
            assert same, f"{loss.name}.{name} has other bounds than {name} of another loss: one setting has one type"

    def add(cls: C) -> C:
        made: dict[str, Any] = {}
        for name, hint in cls.__annotations__.items():
            if name == before:
                made |= {constant: optional(bounded) for constant, bounded in constants.items()}
            made[name] = hint
        cls.__annotations__ = made
        for constant in constants:
            setattr(cls, constant, None)
        return cls

    return add


def optional(hint: Any) -> Any:
    """The type of a setting that may be missing, with the bounds of `hint`, if it has any."""
    kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return Annotated[(kind | None, *bounds)] if bounds else kind | None


# --- loss ------------------------------------------------------------


LossFunction = Callable[["Tokens", "Tensor"], "TokenLoss"]
"""(tokens, old [M]) -> TokenLoss"""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A policy loss. Class variables hold the properties that settings, warnings and the report use; most losses keep
    the defaults."""

    name: ClassVar[str]
    """The value of `algo.loss`."""
    holds: ClassVar[bool] = True
    """Whether it keeps the policy near the one that sampled, by a bound on the ratio between them or by a penalty."""
    needs_gap: ClassVar[bool] = False
    """Whether only the gap to the sampler keeps the policy near it: `algo.old = trainer`, which has no gap, is then
    refused."""
    cuts: ClassVar[tuple[str, ...]] = ()
    """Constants that are bounds beyond which a token loses its gradient. A bound on a weight is not one of them."""
    of_sequence: ClassVar[bool] = False
    """Whether the bounds apply to the mean over a sequence."""
    reach: ClassVar[Reach] = "token"
    """The tokens that the loss of one token depends on."""
    selection: ClassVar[str] = ""
    """The `algo.select.kind` that it requires."""
    weighs_rollouts: ClassVar[bool] = False
    """Whether the advantage is the weight of a rollout, so that rollouts of weight zero leave the loss and its
    denominator."""
    anchored: ClassVar[bool] = True
    """Whether it is a function of `old`. (A user's own function gets the tokens alone.)"""
    weighs: ClassVar[bool] = True
    """Whether every token's gradient is weighted by a function of its ratio to `old`, as importance sampling does."""
    pairs: ClassVar[bool] = False
    """Whether it is a function of pairs of rollouts (`policy/pairs.py`)."""
    whole: ClassVar[bool] = False
    """Whether it is a function of whole rollouts, so that weights of single tokens or turns have no meaning beside it."""
    needs_reference: ClassVar[bool] = False
    """Whether it compares the policy with the reference model."""
    rejects: ClassVar[bool] = False
    """Whether it may take tokens out by a rule of its own."""

    def __call__(self, tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
        """Returns the loss per token. `old` [M] (no gradient): the log-prob in the ratio r = exp(logprob - old)
        (`objective.old_of`)."""
        raise NotImplementedError

    def ready(self) -> LossFunction:
        """Returns the function that the trainer calls on every microbatch. Raises ConfigError if it cannot be loaded."""
        return self

    def problems(self) -> Iterator[str]:
        """Yields a sentence with a remedy for each constant that cannot work."""
        yield from ()

    def log_bounds(self) -> tuple[float, float] | None:
        """Returns the bounds on the log ratio; None if no bound on it takes a gradient away."""
        return None

    def words(self) -> Iterator[str]:
        """Yields the constants in words, for people."""
        for name, value in self.constants().items():
            yield f"{name} = {value:.6g}"

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """Returns the names of its constants."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def constants(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.reads()}

    def __str__(self) -> str:
        return self.name
