"""Settings of what gives rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

BUILTIN = ("reasoning_gym",)
HANDED = "python:"
"""Before the name of a function that was passed to `headrace.train`: no file has it."""
PUNISHMENT = "soft_overlong_punishment"
"""Its name among the rewards."""
Extract = Literal["", "last_number", "answer_tag"]
_STRICT = ConfigDict(extra="forbid")


def distinct(names: Sequence[str]) -> list[str]:
    """`exact`, `exact#2`: two files may call their function the same."""
    seen: Counter[str] = Counter()
    told = []
    for name in names:
        seen[name] += 1
        told.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return told


def _checked_function(function: str) -> str:
    path, colon, name = function.rpartition(":")
    if function in BUILTIN or (colon and path.endswith(".py") and name.isidentifier()):
        return function
    if name and function == f"{HANDED}{name}":
        return function
    raise ValueError(
        f'reward function "{function}" is neither {" nor ".join(BUILTIN)} nor of the form path/to/file.py:name; write it so'
    )


@dataclass(frozen=True, config=_STRICT)
class RewardSpec:
    function: str
    """`reasoning_gym` (the verifier of the task), or `path/to/file.py:name`. `headrace.train` writes `python:name` of a function
    that it was passed."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Its share of the sum. Negative for a penalty."""
    extract: Extract = ""
    """What the function sees of a completion: all, the last number, or what stands between <answer> and </answer>."""

    _function = field_validator("function")(_checked_function)

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def from_python(self) -> bool:
        return self.function.startswith(HANDED)


@dataclass(frozen=True, config=_STRICT)
class OverlongConfig:
    """Added to the reward of what is trained, not of evaluations: 0 up to rollout.max_tokens - cache tokens, from there down to -1 at
    rollout.max_tokens (DAPO, arXiv 2503.14476)."""

    cache: int = Field(default=0, ge=0)
    """Tokens before the end from which on a completion is punished (the paper's L_cache: 4,096 of 20,480); 0 is off."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Times the punishment. The paper's rewards are -1 and 1; with 0 and 1 half of its weight is in proportion."""


@dataclass(frozen=True, config=_STRICT)
class RewardConfig:
    function: str = ""
    """Short for `functions` with one entry of weight 1."""
    extract: Extract = ""
    """What that one function sees of a completion."""
    extract_truncated: bool = False
    """Extract from completions that were cut off at rollout.max_tokens too. The last number of a sentence that was cut off is not
    its answer, so that without this nothing is extracted from them."""
    functions: tuple[RewardSpec, ...] = ()
    """Several, whose weighted sum is the reward."""
    soft_overlong_punishment: OverlongConfig = Field(default_factory=OverlongConfig)
    timeout: float = Field(default=30.0, gt=0)
    """Seconds that one call for one group may take, without those in which it has to wait for a core; then its rollouts fail with the
    reason `reward_timeout`."""
    workers: int = Field(default=2, gt=0)
    """Calls of functions that are not `async` running at once, each in a process of its own."""

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> RewardConfig:
        if self.function and self.functions:
            raise ValueError("reward.function and reward.functions are both set; keep one of them")
        if self.extract and not self.function:
            raise ValueError(
                "reward.extract belongs to reward.function; give each of reward.functions an extract of its own"
            )
        if self.function:
            _checked_function(self.function)
        if self.soft_overlong_punishment.cache and any(spec.name == PUNISHMENT for spec in self.specs):
            raise ValueError(
                f"a reward function has the name {PUNISHMENT} of reward.{PUNISHMENT}; rename it, or remove the setting"
            )
        return self

    @property
    def specs(self) -> tuple[RewardSpec, ...]:
        return (RewardSpec(self.function, extract=self.extract),) if self.function else self.functions

    @property
    def from_python(self) -> tuple[RewardSpec, ...]:
        """Those that only Python can pass again."""
        return tuple(spec for spec in self.specs if spec.from_python)

    @property
    def weights(self) -> dict[str, float]:
        """Of every reward, by the name that it has in `Scored.rewards`."""
        names = distinct([spec.name for spec in self.specs])
        weights = {name: spec.weight for name, spec in zip(names, self.specs, strict=True)}
        return weights | (
            {PUNISHMENT: self.soft_overlong_punishment.weight} if self.soft_overlong_punishment.cache else {}
        )
