"""Settings of rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

BUILTIN = ("reasoning_gym", "unit_tests", "unit_tests_all")
IN_SANDBOX = ("unit_tests", "unit_tests_all")
"""The built-in rewards that run completions as programs."""
HANDED = "python:"
"""Prefix of the name of a function that was passed to `headrace.train` and is in no file."""
PUNISHMENT = "soft_overlong_punishment"
"""The name of the punishment among the rewards."""
Extract = Literal["", "last_number", "answer_tag", "code_block"]
_STRICT = ConfigDict(extra="forbid")


def distinct(names: Sequence[str]) -> list[str]:
    """Makes names distinct (`exact`, `exact#2`): functions of two files may have the same name."""
    seen: Counter[str] = Counter()
    made = []
    for name in names:
        seen[name] += 1
        made.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return made


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
    """`reasoning_gym` (the task's own verifier); `unit_tests` (the share of the row's tests that the completion, a program,
    passes) or `unit_tests_all` (1 if it passes them all; docs/sandbox.md); or `path/to/file.py:name`. `headrace.train`
    writes `python:name` for a function that it was passed."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The function's weight in the sum; negative for a penalty."""
    extract: Extract = ""
    """The part of a completion that the function receives: all of it, the last number, the text between <answer> and
    </answer>, or the last block of code between lines of three backticks."""

    _function = field_validator("function")(_checked_function)

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def from_python(self) -> bool:
        return self.function.startswith(HANDED)


@dataclass(frozen=True, config=_STRICT)
class OverlongConfig:
    """A punishment of long completions, added to rewards in training but not in evaluations: 0 up to rollout.max_tokens
    - cache tokens, and from there falling to -1 at rollout.max_tokens (DAPO, arXiv 2503.14476)."""

    cache: int = Field(default=0, ge=0)
    """The last tokens before rollout.max_tokens, in which the punishment grows (the paper's L_cache: 4,096 of 20,480);
    0 is off."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor of the punishment. The paper's rewards are -1 and 1; for rewards of 0 and 1, 0.5 has the same
    proportion."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RewardConfig:
    function: str = ""
    """Short for `functions` with one entry of weight 1."""
    extract: Extract = ""
    """The part of a completion that this function receives; see `reward.functions`."""
    extract_truncated: bool = False
    """Whether an answer is extracted from completions cut off at rollout.max_tokens too. By default nothing is: the
    last number of an unfinished sentence is not its answer."""
    functions: tuple[RewardSpec, ...] = ()
    """Several reward functions. Their weighted sum is the reward."""
    soft_overlong_punishment: OverlongConfig = Field(default_factory=OverlongConfig)
    timeout: float = Field(default=30.0, gt=0)
    """Seconds that one call for one group may take, not counting time spent waiting for a core. After that its rollouts
    fail with the reason `reward_timeout`."""
    workers: int = Field(default=2, gt=0)
    """Number of processes for reward functions that are not `async`: as many calls run at once."""

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
        """The functions that only Python can pass again."""
        return tuple(spec for spec in self.specs if spec.from_python)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every reward, by its name in `Scored.rewards`."""
        names = distinct([spec.name for spec in self.specs])
        weights = {name: spec.weight for name, spec in zip(names, self.specs, strict=True)}
        return weights | (
            {PUNISHMENT: self.soft_overlong_punishment.weight} if self.soft_overlong_punishment.cache else {}
        )


def sandbox_problems(config: RewardConfig, *, group: int, seconds: float) -> Iterator[str]:
    """Returns a sentence if slow programs could use up the time of a group's call. `seconds`: the most that one program may take."""
    used = [spec.function for spec in config.specs if spec.function in IN_SANDBOX]
    if used and config.timeout < (longest := group * seconds):
        yield (
            f"reward.timeout = {config.timeout:g} is less than rollout.group_size = {group} programs that each take sandbox.seconds = "
            f"{seconds:g} under {used[0]}, so endless loops would cost the whole group; set reward.timeout to {2 * longest:g}"
        )
