"""Bounds of constants that several losses share, and the settings made from constants. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field

from headrace.algo.policy.loss import Loss

C = TypeVar("C", bound=type)

ClipLow = Annotated[float, Field(gt=0, le=1)]
ClipHigh = Annotated[float, Field(gt=0)]
Tau = Annotated[float, Field(gt=0)]
Delta = Annotated[float, Field(gt=0, le=1)]
Cap = Annotated[float, Field(gt=0)]
Penalty = Annotated[float, Field(ge=0)]


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
    """The type of a setting that may be missing, with the bounds of `hint`."""
    kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return Annotated[(kind | None, *bounds)]
