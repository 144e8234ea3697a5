"""Settings of rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from headrace.episodes.scoring.extract import Extract, Form
from headrace.episodes.scoring.services.config import LABELS, EndpointConfig, JudgeConfig, ServiceConfig, step_problems
from headrace.settings.strict import STRICT

BUILTIN = ("reasoning_gym", "unit_tests", "unit_tests_all")
IN_SANDBOX = ("unit_tests", "unit_tests_all")
"""The built-in rewards that run completions as programs."""
HANDED = "python:"
"""Prefix of the name of a function that was passed to `headrace.train` and is in no file."""
PUNISHMENT = "soft_overlong_punishment"
"""The name of the punishment among the rewards."""


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


@dataclass(frozen=True, config=STRICT)
class RewardSpec:
    function: str
    """`reasoning_gym` (the task's verifier); `unit_tests` (the share of the row's tests that a program passes) or
    `unit_tests_all` (1 if all pass; docs/sandbox.md); or `path/to/file.py:name`. `headrace.train` writes `python:name`
    for a function passed to it."""
    weight: float = 1.0
    """The weight in the sum; negative for a penalty."""
    extract: Extract = ""
    """The part of a completion that it receives: all, the last number, the text between <answer> and </answer>, or the
    last block of code between lines of three backticks."""
    _: KW_ONLY
    compares: bool = False
    """Whether it compares two completions: called with `first` and `second`, it returns 1, 0 or 0.5 for a tie, and the
    reward is the share of comparisons won."""
    segments: str = ""
    """The text that ends a step, such as `"\\n\\n"`: the function also gets each completion's `segments`, and returns a
    list with a number for each step. Empty: one number for each completion."""
    form: Form = "sum"
    """segments: the reward is the sum of the steps' numbers, or the smallest."""

    _function = field_validator("function")(_checked_function)

    @model_validator(mode="after")
    def _nothing_idle(self) -> RewardSpec:
        if problem := next(step_problems(self.function, self), ""):
            raise ValueError(problem)
        return self

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def from_python(self) -> bool:
        return self.function.startswith(HANDED)


@dataclass(frozen=True, config=STRICT)
class OverlongConfig:
    """A punishment of long completions in training, not in evaluations: 0 up to rollout.max_tokens - cache, falling to
    -1 at rollout.max_tokens (DAPO, arXiv 2503.14476)."""

    cache: int = Field(default=0, ge=0)
    """Last tokens before rollout.max_tokens in which the punishment grows (the paper: 4,096 of 20,480). 0: off."""
    weight: float = Field(default=1.0, gt=0)
    """The factor of the punishment: the paper's 1 is for rewards of -1 and 1, so 0.5 suits 0 and 1."""


ENDPOINTS = ("services", "judges")
"""The settings of `RewardConfig` that are lists of scorers over HTTP, each an `EndpointConfig`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardConfig:
    function: str = ""
    """Short for `functions` with one entry of weight 1."""
    extract: Extract = ""
    """The part of a completion that it receives; see `reward.functions`."""
    special_tokens: Literal["show", "hide"] = "show"
    """Whether rewards and environments see a completion's special tokens, such as `<think>`; never the one that ends
    it."""
    extract_truncated: bool = False
    """Extract answers from completions cut off at rollout.max_tokens too."""
    functions: tuple[RewardSpec, ...] = ()
    """Several reward functions. The weighted sum of all functions, services and judges is the reward."""
    services: tuple[ServiceConfig, ...] = ()
    """HTTP services that give rewards (docs/scoring.md)."""
    judges: tuple[JudgeConfig, ...] = ()
    """Language models that judge completions (docs/scoring.md)."""
    soft_overlong_punishment: OverlongConfig = Field(default_factory=OverlongConfig)
    timeout: float = Field(default=30.0, gt=0)
    """Seconds of one call for one group, without waiting for a core. Then its rollouts fail (`reward_timeout`)."""
    workers: int = Field(default=2, gt=0)
    """Processes for reward functions that are not `async`: as many calls run at once."""

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
        if problem := next(_name_problems(self), ""):
            raise ValueError(problem)
        if self.soft_overlong_punishment.cache and PUNISHMENT in self._names():
            raise ValueError(
                f"a part of the reward has the name {PUNISHMENT} of reward.{PUNISHMENT}; rename it, or remove the setting"
            )
        return self

    @property
    def specs(self) -> tuple[RewardSpec, ...]:
        return (RewardSpec(self.function, extract=self.extract),) if self.function else self.functions

    @property
    def endpoints(self) -> tuple[EndpointConfig, ...]:
        """The services and judges."""
        return tuple(endpoint for name in ENDPOINTS for endpoint in getattr(self, name))

    def _names(self) -> list[str]:
        return [*distinct([spec.name for spec in self.specs]), *(endpoint.name for endpoint in self.endpoints)]

    @property
    def _called(self) -> tuple[RewardSpec | ServiceConfig, ...]:
        """The functions and services, which have settings in common."""
        return (*self.specs, *self.services)

    @property
    def given(self) -> bool:
        """Whether the settings name anything that gives a reward."""
        return bool(self.specs or self.endpoints)

    @property
    def segmented(self) -> str:
        """The name of the part that scores the steps of completions; empty if none does."""
        return next((spec.name for spec in self._called if spec.segments), "")

    @property
    def comparing(self) -> tuple[str, ...]:
        """The names of the parts that compare completions."""
        told = tuple(spec.name for spec in self._called if spec.compares)
        return (*told, *(judge.name for judge in self.judges if judge.mode != "score"))

    @property
    def named(self) -> list[str]:
        """The functions, each once."""
        return list(dict.fromkeys(spec.function for spec in self.specs))

    @property
    def for_trial(self) -> RewardConfig:
        """These settings with one more attempt at most: who tries a reward before a run waits for an answer."""
        once: dict[str, Any] = {
            name: tuple(replace(endpoint, retries=min(endpoint.retries, 1)) for endpoint in getattr(self, name))
            for name in ENDPOINTS
        }
        return replace(self, **once)

    @property
    def extracts(self) -> set[str]:
        """The kinds of extraction that must find something in a right answer."""
        return {getattr(spec, "extract", "") for spec in (*self.specs, *self.endpoints)}

    @property
    def from_python(self) -> tuple[RewardSpec, ...]:
        """The functions that only Python can pass again."""
        return tuple(spec for spec in self.specs if spec.from_python)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every reward, by its name in `Scored.rewards`."""
        names = distinct([spec.name for spec in self.specs])
        weights = {name: spec.weight for name, spec in zip(names, self.specs, strict=True)}
        weights |= {endpoint.name: endpoint.weight for endpoint in self.endpoints}
        return weights | (
            {PUNISHMENT: self.soft_overlong_punishment.weight} if self.soft_overlong_punishment.cache else {}
        )


def _name_problems(config: RewardConfig) -> Iterator[str]:
    for name, count in Counter(config._names()).items():
        if count > 1:
            yield f"two parts of the reward are called {name}; rename one of reward.services or reward.judges"
    segmented = [spec.name for spec in config._called if spec.segments]
    if len(segmented) > 1:
        yield f"{' and '.join(segmented)} both score steps (segments), and a token belongs to one step; keep one of them"


def waiting_problems(config: RewardConfig, *, group: int, stop_after: float) -> Iterator[str]:
    """Returns a sentence for each scorer over HTTP that cannot work in this run. `stop_after`: `watch.stop_after`."""
    for endpoint in config.endpoints:
        if endpoint.deadline >= stop_after:
            yield (
                f"{endpoint.name} may take deadline = {endpoint.deadline:g} s, and a wait of watch.stop_after = {stop_after:g} s ends the run; lower the "
                "first or raise the second"
            )
    for judge in config.judges:
        if judge.mode == "rank" and group > len(LABELS):
            yield (
                f"the judge {judge.name} ranks at most {len(LABELS)} completions, and a group has {group}; use mode = "
                '"compare" or "score", or a smaller group'
            )
    if config.comparing and group < 2:
        yield f"{config.comparing[0]} compares completions, and rollout.group_size = {group}; use at least 2"


def sandbox_problems(config: RewardConfig, *, group: int, seconds: float) -> Iterator[str]:
    """Returns a sentence if slow programs could use up the time of a group's call. `seconds`: the most that one program may take."""
    used = [spec.function for spec in config.specs if spec.function in IN_SANDBOX]
    if used and config.timeout < (longest := group * seconds):
        yield (
            f"reward.timeout = {config.timeout:g} is less than the {group} programs of a group that each take sandbox.seconds = "
            f"{seconds:g} under {used[0]}, so endless loops would cost the whole group; set reward.timeout to {2 * longest:g}"
        )
