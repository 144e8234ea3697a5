"""The base of all rules. Imports no torch: settings are read without it.

A rule is a subclass in a file of its own. The first paragraph of its docstring is the purpose of its setting, `algo.correction.<name>`, in
docs/settings.md; the annotation of `threshold` has the setting's bounds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.algo.policy.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Rule:
    name: ClassVar[str]
    """The setting in `[algo.correction]`, and the name under which its tokens are counted."""
    of_sequence: ClassVar[bool] = False
    """Whether the threshold applies to the mean over a sequence."""
    threshold: float

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[M] bool: the tokens that are taken out. `x` [M], without gradient: the log-prob whose gap to the sampler's counts."""
        raise NotImplementedError

    def log_bounds(self) -> tuple[float, float] | None:
        """The bounds on the log ratio that rounding alone may cross; None if they lie far outside it."""
        return None
