"""Settings of the choice of prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from headrace.settings.strict import STRICT

_OF_CHOICE: dict[str, Any] = {"candidates": 64, "remembered": 50_000}
_OF_POOLS: dict[str, Any] = {"rest": 512, "wait": 256}
_OF_CONTRAST: dict[str, Any] = {"half_life": 256, "least_chance": 0.5, "largest_group": 0}
_FOREIGN: dict[str, dict[str, Any]] = {
    "uniform": _OF_CHOICE | _OF_POOLS | _OF_CONTRAST,
    "pools": _OF_CONTRAST,
    "contrast": _OF_POOLS,
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CurriculumConfig:
    """The prompt that is drawn next. Prompts with equal tokens are the same, so this helps tasks whose prompts come
    back: several epochs, or a family with few problems."""

    kind: Literal["uniform", "pools", "contrast"] = "uniform"
    """The order in which prompts are drawn (docs/curriculum.md). uniform: the task's."""
    candidates: int = Field(default=_OF_CHOICE["candidates"], gt=1)
    """pools, contrast: the most prompts that a draw looks at before it takes the best. No known prompt is drawn more
    than this many times as often as the task yields it."""
    half_life: int = Field(default=_OF_CONTRAST["half_life"], gt=0)
    """contrast: draws after which an observed group counts half, because the policy has changed."""
    least_chance: float = Field(default=_OF_CONTRAST["least_chance"], gt=0, lt=1)
    """contrast: the probability of contrast that a drawn prompt's group must have."""
    largest_group: int = Field(default=_OF_CONTRAST["largest_group"], ge=0)
    """contrast: the most rollouts of a group. A group has `rollout.group_size` of them times 1, 2, 4, ...: the fewest
    that reach `least_chance`. 0: all groups have the same size."""
    rest: int = Field(default=_OF_POOLS["rest"], gt=0)
    """pools: draws for which a prompt rests after its first solved group."""
    wait: int = Field(default=_OF_POOLS["wait"], gt=0)
    """pools: draws for which it rests after its first hopeless or failed group."""
    remembered: int = Field(default=_OF_CHOICE["remembered"], gt=0)
    """pools, contrast: prompts remembered, the latest drawn."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> CurriculumConfig:
        for setting, unset in _FOREIGN[self.kind].items():
            if getattr(self, setting) != unset:
                raise ValueError(
                    f'curriculum.{setting} means nothing to curriculum.kind = "{self.kind}"; remove it, or change curriculum.kind'
                )
        return self

    @property
    def chooses(self) -> bool:
        return self.kind != "uniform"

    @property
    def words(self) -> str:
        """Says which prompt is drawn next."""
        if self.kind == "uniform":
            return "in the order of the task"
        if self.kind == "pools":
            return (
                f"in the order of the task; after a group without contrast a prompt rests for {self.rest} draws if it was solved, and for "
                f"{self.wait} if not, each time for twice as long; a draw looks at {self.candidates} prompts at most"
            )
        message = (
            f"the first whose group has contrast with a probability of {self.least_chance:g}, or the best of {self.candidates}; what a group "
            f"showed counts half after {self.half_life} draws"
        )
        return f"{message}; a group grows to {self.largest_group} rollouts for it" if self.largest_group else message

    def largest(self, group_size: int) -> int:
        """The most rollouts of a group. `group_size`: the least."""
        return max(group_size, self.largest_group)
