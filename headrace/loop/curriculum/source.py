"""The port through which the pipeline draws prompts, what a checkpoint holds of it, and the task's own order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.core.protocols import Task
from headrace.core.reports import PromptChoice
from headrace.core.types import Prompt, Struct
from headrace.durable.journal import AnyRecord
from headrace.loop.curriculum.beliefs import Belief, Level
from headrace.loop.curriculum.observations import RewardScale


class CurriculumState(Struct, frozen=True):
    """The part of a checkpoint beside the cursor of the task."""

    ratings: tuple[tuple[int, Belief], ...]
    """Pairs of key and belief, the one that was not drawn for longest first."""
    flying: dict[int, int]
    """The key of every ticket whose group is being generated or scored."""
    next_draw: int
    """The ticket after the last one drawn."""
    scale: RewardScale
    level: Level = Level()


class Curriculum(Protocol):
    """The source of the prompts to be trained on."""

    @property
    def task(self) -> Task: ...

    def draw(self, ticket: int) -> tuple[Prompt, PromptChoice | None]:
        """Returns the prompt of the next ticket, and how it was chosen; None if it was not."""

    def count(self, record: AnyRecord) -> None:
        """Learns from a record of the journal."""

    def state(self) -> CurriculumState | None: ...

    def restore(self, cursor: Mapping[str, Any], state: CurriculumState | None) -> None:
        """`cursor`: of the task. `state`: None if the checkpoint is of a run that did not choose; then no prompt is known."""


class TaskOrder:
    """Draws the task's prompts in its own order (`curriculum.kind = "uniform"`)."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def draw(self, ticket: int) -> tuple[Prompt, PromptChoice | None]:
        return self.task.draw(), None

    def count(self, record: AnyRecord) -> None:
        pass

    def state(self) -> CurriculumState | None:
        return None

    def restore(self, cursor: Mapping[str, Any], state: CurriculumState | None) -> None:
        self.task.restore(cursor)
