"""Settings of environments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import ConfigDict, field_validator
from pydantic.dataclasses import dataclass

from headrace.environments.kinds import ENVIRONMENTS, environment_kind


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EnvironmentConfig:
    kind: str = "single_turn"
    """The environment that is made for each rollout. single_turn: one completion of the prompt."""

    @field_validator("kind")
    @classmethod
    def _is_there(cls, kind: str) -> str:
        if kind not in ENVIRONMENTS:
            raise ValueError(f'environment.kind = "{kind}" is not one of the environments: {", ".join(ENVIRONMENTS)}')
        return kind

    @property
    def turns(self) -> int:
        """The most turns that a rollout can have."""
        return environment_kind(self.kind).limits.turns


def turn_problems(
    turns: int, *, text_teachers: Sequence[str], length: str, penalty: bool, routing: bool
) -> Iterator[str]:
    """Returns a sentence for each part of the run that cannot carry episodes of several turns yet. `length`: the
    algorithm that divides by the length of the longest rollout; empty if none does. `penalty`: whether the algorithm
    has a length penalty; `routing`: whether the choice of experts is kept."""
    if turns == 1:
        return
    said = f"the environment has up to {turns} turns, and"
    for name in text_teachers:
        yield f'{said} the teacher {name} reads the text of one: use mode = "tokens"'
    if length:
        yield (
            f"{said} {length} divides by rollout.max_tokens, the longest that one turn can be: set algo.length_constant to the tokens of the "
            "longest episode"
        )
    if penalty:
        yield f"{said} algo.length_penalty compares a rollout with rollout.max_tokens, the longest that one turn can be: set it to 0"
    if routing:
        yield (
            f"{said} rollout.keep_routing records the experts of the last one's request alone, which may have computed the turns before it "
            "again under newer weights: set it to false"
        )
