"""A problem of `reasoning-gym` with further attempts: the model reads that its answer was wrong, and may give another one."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.environments.libraries.options import known_options, not_installed
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.environments.workers.step_driver import LibraryRollout
from headrace.episodes.environments.workers.talk import AgentReply, BlockingAgent
from headrace.settings.extras import is_installed

KIND = "reasoning_gym"
OPTIONS: dict[str, Any] = {"discount": 0.8, "feedback": "That is not right. Try again."}


class Attempts(LibraryRollout):
    """A rollout: one problem. It is subclassed with the settings."""

    most: int
    discount: float
    feedback: str

    def __init__(self, prompt: Any, **columns: Any) -> None:
        from reasoning_gym import get_score_answer_fn

        self._prompt, self._problem = prompt, problem_of(prompt, columns)
        self._verify = get_score_answer_fn(self._problem["metadata"]["source_dataset"])
        self._scores: list[float] = []

    def step(self, agent: BlockingAgent, reply: AgentReply | None) -> Any:
        """The reward is the best score of all attempts, each with its discount."""
        if reply is None:
            return self._prompt
        if reply.stop != "limit":
            self._scores.append(float(self._verify(answer=reply.text.strip(), entry=self._problem)))
            if len(self._scores) < self.most and self._scores[-1] < 1.0:
                return self.feedback
        counted = [score * self.discount**attempt for attempt, score in enumerate(self._scores)]
        return {KIND: max(counted)} if counted else {}

    def export_state(self) -> dict[str, Any]:
        return {"scores": self._scores}

    def restore(self, state: dict[str, Any]) -> None:
        self._scores = list(state["scores"])


def open_reasoning_gym(settings: LibrarySettings) -> type[Attempts]:
    """Returns the class that plays a rollout. A rollout has at most `environment.max_turns` attempts, and ends with the first answer
    that the family's verifier gives the full score of 1. `discount`: what each further attempt multiplies its score with;
    `feedback`: what the model reads after an answer that was not right.

    Raises ConfigError if the package is not installed, or the settings do not fit."""
    if not is_installed("reasoning_gym"):
        raise not_installed(KIND, "tasks", "reasoning-gym")
    if settings.name:
        raise ConfigError(
            f'environment.name = "{settings.name}" means nothing to environment.kind = "{KIND}": the problems are those of '
            'task.kind = "reasoning_gym" and task.name; remove it'
        )
    options = known_options(settings, KIND, OPTIONS)
    discount = float(options["discount"])
    if not 0.0 <= discount <= 1.0:
        raise ConfigError(f"environment.options.discount = {discount:g} is not between 0 and 1")
    return Attempts.opened(KIND, most=settings.max_turns, discount=discount, feedback=options["feedback"])


def problem_of(prompt: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the problem as its family made it. `entry` is its literal (see `episodes/tasks/reasoning_gym.py`).

    Raises ValueError for a row that is not of that task."""
    if literal := columns.get("entry"):
        return dict(ast.literal_eval(literal))
    if "source_dataset" not in (columns.get("metadata") or {}):
        raise ValueError(f'environment.kind = "{KIND}" plays the problems of task.kind = "reasoning_gym"; set it')
    return {"question": prompt, "answer": columns["answer"], "metadata": columns["metadata"]}
