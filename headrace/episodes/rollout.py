"""Settings of rollouts, and the requests that follow from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.types import Constraint, Prompt, Request, Sampling
from headrace.models.grammars import check_constraint
from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ForksConfig:
    alternatives: int = Field(default=0, ge=0)
    """The number of times that each rollout of a group is played again from one of its turns. All that follow that turn, the
    rollout's own end included, are compared with each other; the turns before it with those of the other rollouts, by the mean
    reward of all that follow them. Needs an environment of several turns that exports its state. 0: no forks."""
    turn: Literal["first", "last", "random", "entropy"] = "random"
    """The turn at which a rollout branches: its first, its last, any, or the one whose tokens were the least probable on
    average, which estimates the entropy."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConstraintConfig:
    json_schema: dict[str, Any] = Field(default_factory=dict)
    """A JSON schema that every completion must satisfy, as a table. Needs llguidance (docs/constraints.md)."""
    regex: str = ""
    """A regular expression that every completion must match as a whole."""
    choice: tuple[str, ...] = ()
    """Texts of which every completion must be one."""
    grammar: str = ""
    """A grammar in llguidance's variant of Lark's format, whose start is `start`."""

    @model_validator(mode="after")
    def _can_be_followed(self) -> ConstraintConfig:
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(
                f"rollout.constraint has {' and '.join(given)}; a completion is held to one of them: remove the others"
            )
        if (constraint := self.constraint) is not None:
            try:
                check_constraint(constraint)
            except ValueError as error:
                raise ValueError(f"rollout.constraint.{given[0]}: {error}") from None
        return self

    @property
    def constraint(self) -> Constraint | None:
        """None if completions are free."""
        if self.json_schema:
            return Constraint("json_schema", json.dumps(self.json_schema))
        if self.choice:
            return Constraint("choice", json.dumps(self.choice))
        if self.regex:
            return Constraint("regex", self.regex)
        return Constraint("grammar", self.grammar) if self.grammar else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutConfig:
    group_size: int = Field(default=8, gt=0)
    """G: the number of completions per prompt."""
    max_tokens: int = Field(default=64, gt=0)
    """The most tokens of a completion. A longer one is cut off (`algo.overlong` decides whether it is trained on)."""
    temperature: float = Field(default=1.0, ge=0)
    """Temperature of the distribution that is sampled from and trained."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keeps the most probable tokens that together have this probability; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keeps this many of the most probable tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keeps tokens whose probability is at least this fraction of the most probable token's; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, with the token that completes one: its text, which rewards and environments read, keeps the string,
    and what else that token holds (docs/scoring.md)."""
    constraint: ConstraintConfig = Field(default_factory=ConstraintConfig)
    """The language that completions are held to while they are sampled."""
    keep_mask: bool = True
    """Record the tokens that the constraint, top_p, top_k and min_p left, and train the distribution that was sampled from.
    If false, the trainer uses the whole vocabulary, which is wrong; it is offered for comparison."""
    keep_routing: bool = False
    """Record which experts every token was routed to, and route it to the same ones in the trainer. For
    mixture-of-experts models."""
    forks: ForksConfig = Field(default_factory=ForksConfig)
    patience: int = Field(default=200, gt=0)
    """Number of consecutive groups without anything to learn from (no contrast, for example) after which the run stops
    and says why. Failed groups are not counted here (`watch.failed_pause`)."""

    @field_validator("stop")
    @classmethod
    def _stops_somewhere(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError(
                "rollout.stop holds an empty string, with which every completion would end at its first token; remove it"
            )
        return stop

    def of(self, prompt: Prompt) -> int:
        """The number of rollouts of a prompt, without alternatives."""
        return prompt.rollouts or self.group_size

    def all_of(self, prompt: Prompt) -> int:
        """The number of rollouts of a prompt, alternatives included."""
        return self.of(prompt) * (1 + self.forks.alternatives)

    def played(self, turns: int) -> float:
        """Returns the rollouts of a prompt, where an alternative counts as the share of its turns that are its own. `turns`: those of a
        rollout."""
        share = {"first": 1.0, "last": 1 / turns}.get(self.forks.turn, (turns + 1) / (2 * turns))
        return self.group_size * (1 + self.forks.alternatives * share)

    @property
    def truncates(self) -> bool:
        """Whether tokens are cut out of the distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.constraint.constraint is not None

    @property
    def caveats(self) -> list[str]:
        """Warnings for the start of a run."""
        if self.keep_mask or not self.truncates:
            return []
        return [
            "rollout.keep_mask = false: the trainer compares log-probs of the whole vocabulary with those of a truncated one, which "
            "is not the distribution that was sampled from; set it to true unless that is what you want to see"
        ]

    def request(
        self,
        name: str,
        context: Sequence[int],
        seed: int,
        priority: int,
        adapter: str = "",
        *,
        constraint: Constraint | None = None,
    ) -> Request:
        """The request for a turn that will be trained on. `context`: the tokens before it. `constraint`: in place of the setting."""
        return Request(
            name,
            tuple(context),
            self._sampling(seed, self.temperature, constraint),
            priority=priority,
            adapter=adapter,
            return_mask=self.keep_mask and (self.truncates or constraint is not None),
            return_routing=self.keep_routing,
        )

    def evaluation(
        self,
        name: str,
        context: Sequence[int],
        seed: int,
        temperature: float,
        adapter: str = "",
        *,
        constraint: Constraint | None = None,
    ) -> Request:
        """The request for a turn that is only scored: nothing is recorded, and it goes before those of training."""
        return Request(name, tuple(context), self._sampling(seed, temperature, constraint), adapter=adapter)

    def _sampling(self, seed: int, temperature: float, constraint: Constraint | None) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            seed=seed,
            constraint=constraint or self.constraint.constraint,
        )


def seed_of(*parts: object) -> int:
    """A 63-bit seed from names and numbers, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
