"""Settings of rollouts, and the requests that follow from them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Literal

from msgspec.structs import replace
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from headrace.core.protocols import KEPT, EnvironmentKind
from headrace.core.types import Branch, Completion, Constraint, Episode, Prompt, Request, Sampling, Scored, Turn
from headrace.models.grammars import check_constraint
from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ForksConfig:
    alternatives: int = Field(default=0, ge=0)
    """Times that each rollout is played again from one of its turns (docs/environments.md). Needs several turns and
    an exported state."""
    turn: Literal["first", "last", "random", "entropy"] = "random"
    """The turn at which a rollout branches; entropy: the one whose tokens were the least probable on average."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConstraintConfig:
    json_schema: dict[str, Any] = Field(default_factory=dict)
    """A JSON schema, as a table, that every completion must satisfy. Needs llguidance (docs/constraints.md)."""
    regex: str = ""
    """A regular expression that matches every completion as a whole."""
    choice: tuple[str, ...] = ()
    """Texts, one of which every completion must be."""
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
    """G: completions per prompt."""
    max_tokens: int = Field(default=64, gt=0)
    """The most tokens of a completion; a longer one is cut off (`algo.overlong`)."""
    temperature: float = Field(default=1.0, ge=0)
    """Temperature of the distribution that is sampled from and trained."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keeps the most probable tokens that together have this probability; 1: all."""
    top_k: int = Field(default=0, ge=0)
    """Keeps this many of the most probable tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Keeps tokens of at least this fraction of the most probable one's probability; 0: all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, with the token that completes one; the text keeps both (docs/scoring.md)."""
    constraint: ConstraintConfig = Field(default_factory=ConstraintConfig)
    """The language that completions are held to while they are sampled."""
    keep_mask: bool = True
    """Record the tokens that the constraint, top_p, top_k and min_p left, and train the distribution that was
    sampled. false: the trainer uses the whole vocabulary, which is wrong; for comparison only."""
    keep_routing: bool = False
    """Mixtures of experts: record the experts of every token, and route it to the same ones in the trainer."""
    forks: ForksConfig = Field(default_factory=ForksConfig)
    patience: int = Field(default=200, gt=0)
    """Groups in a row with nothing to learn from, after which the run stops. Failed groups do not count
    (`watch.failed_pause`)."""

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


# --- Alternatives from a turn of an episode ("pivot" resampling)
# A rollout that is over is played again from one of its turns.
#
# An alternative takes the turns before the pivot from the rollout, and its environment goes on from the state that was exported there, as after
# a kill. So the tokens before the pivot are the same ones. They are computed once by an engine that shares prefixes, stored once
# (`Scored.branches`), and forwarded once by a trainer that packs rows as trees.


def fork_problem(config: ForksConfig, kind: EnvironmentKind, setting: str, remedy: str) -> str:
    """Returns why rollouts of this environment cannot branch, with the remedy; empty if they can."""
    if not config.alternatives or kind.resumes in KEPT:
        return ""
    return (
        f"rollout.forks.alternatives = {config.alternatives} plays rollouts again from the middle, and {setting} cannot go on from there: {remedy}, "
        "or set rollout.forks.alternatives = 0"
    )


def fork_problems(
    config: ForksConfig, *, turns: int, credit: str, kl_in_reward: bool, per_rollout: str
) -> Iterator[str]:
    """Returns a sentence for each setting that cannot follow episodes that branch. `turns`: the most of a rollout; `credit`:
    `algo.credit`; `per_rollout`: an algorithm that knows rollouts as a whole, or as one chain of tokens; empty if it does not."""
    if not config.alternatives:
        return
    message = f"rollout.forks.alternatives = {config.alternatives}"
    if turns == 1:
        yield f"{message} branches at a turn, and the environment has one: set environment.function, or set it to 0"
    if credit != "rollout":
        yield f'{message} gives the turns behind a fork their own advantage, and so does algo.credit = "{credit}": keep one of them'
    if kl_in_reward:
        yield f'{message} compares rollouts that branch, whose divergences have no one sum: set algo.kl.place = "loss"'
    if per_rollout:
        yield f"{message} compares branches, and {per_rollout} takes a rollout as a whole: choose another algo.name"


def pivot_of(episode: Episode, config: ForksConfig, seed: int) -> int:
    """Returns the number of the turn at which the episode branches. `seed`: of a choice at random."""
    turns = episode.turns
    match config.turn:
        case "first":
            return 0
        case "last":
            return len(turns) - 1
        case "random":
            return seed_of(seed, "pivot") % len(turns)
        case _:
            return max(range(len(turns)), key=lambda number: _surprise(turns[number].completion))


def _surprise(done: Completion) -> float:
    """The mean of -log p of the sampled tokens, an unbiased estimate of the entropy per token."""
    known = [-value for value in done.logprobs if math.isfinite(value)]
    return fmean(known) if known else 0.0


def path_to(episode: Episode, number: int) -> tuple[int, ...]:
    """Returns all tokens before the completion of a turn."""
    turn = episode.turns[number]
    path = turn.context
    while turn.parents:
        turn = episode.turns[turn.parents[0]]
        path = turn.context + turn.completion.tokens + path
    return path


def as_tree(leaves: Sequence[Scored], pivot: int) -> Scored:
    """Joins the scored rollouts that share the turns before `pivot` into one: an episode that branches, whose rewards are the means of its branches'."""
    first = leaves[0]
    if len(leaves) == 1:
        return first
    turns: list[Turn] = list(first.episode.turns[:pivot])
    given = [dict(rewards) for rewards in _of_turns(first)[:pivot]]
    teachers, references = list(first.teachers[:pivot]), list(first.references[:pivot])
    branches = []
    for leaf in leaves:
        own, start = leaf.episode.turns[pivot:], len(turns)
        turns += [moved(turn, partial(_place_of, pivot, start)) for turn in own]
        given += [dict(rewards) for rewards in _of_turns(leaf)[pivot:]]
        teachers += leaf.teachers[pivot:]
        references += leaf.references[pivot:]
        branches.append(Branch(start, len(turns), leaf.reward, leaf.rewards, leaf.episode.cut))
    cuts = [leaf.episode.cut for leaf in leaves]
    return replace(
        first,
        episode=Episode(tuple(turns), cuts[0] if all(cuts) else ""),
        reward=fmean(leaf.reward for leaf in leaves),
        rewards=_means([leaf.rewards for leaf in leaves]),
        turn_rewards=tuple(given) if any(given) else (),
        teachers=tuple(teachers),
        references=tuple(references),
        branches=tuple(branches),
    )


def _of_turns(rollout: Scored) -> Sequence[Mapping[str, float]]:
    return rollout.turn_rewards or ({},) * len(rollout.episode.turns)


def moved(turn: Turn, place: Callable[[int], int]) -> Turn:
    """Returns the turn with the new places of the turns that it names."""
    return replace(turn, parents=tuple(map(place, turn.parents)), rewrites=tuple(map(place, turn.rewrites)))


def _place_of(pivot: int, start: int, number: int) -> int:
    """Returns the place of turn `number` of an end whose turns from `pivot` on begin at `start`."""
    return number if number < pivot else number - pivot + start


def _means(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for reward in rewards for name in reward)
    return {name: fmean(reward[name] for reward in rewards if name in reward) for name in names}
