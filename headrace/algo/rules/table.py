"""The table of rules, and their settings. To add a rule, add its class to `_ALL`."""

from __future__ import annotations

from typing import TypeVar, get_type_hints

from headrace.algo.policy.constants import optional
from headrace.algo.rules.kpop import KPop
from headrace.algo.rules.opsm import OPSM
from headrace.algo.rules.rule import Rule
from headrace.algo.rules.veto import Veto

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
