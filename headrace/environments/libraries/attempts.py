"""A problem of `reasoning-gym` with further attempts: the model reads that its answer was wrong, and may give another one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from headrace.environments.libraries.options import known_options, not_installed
from headrace.environments.workers.loading import LibrarySettings
from headrace.environments.workers.talk import BlockingAgent
from headrace.errors import ConfigError

KIND = "reasoning_gym"
OPTIONS: dict[str, Any] = {"discount": 0.8, "feedback": "That is not right. Try again."}


def open_reasoning_gym(settings: LibrarySettings) -> Callable[..., Any]:
    """Returns the function that plays a rollout. A rollout has at most `environment.max_turns` attempts, and ends with the first answer
    that the family's verifier gives the full score of 1. `discount`: what each further attempt multiplies its score with;
    `feedback`: what the model reads after an answer that was not right.

    Raises ConfigError if the package is not installed, or the settings do not fit."""
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError:
        raise not_installed(KIND, "tasks", "reasoning-gym") from None
    if settings.name:
        raise ConfigError(
            f'environment.name = "{settings.name}" means nothing to environment.kind = "{KIND}": the problems are those of '
            'task.kind = "reasoning_gym" and task.name; remove it'
        )
    options = known_options(settings, KIND, OPTIONS)
    discount, feedback = float(options["discount"]), options["feedback"]
    if not 0.0 <= discount <= 1.0:
        raise ConfigError(f"environment.options.discount = {discount:g} is not between 0 and 1")

    def reasoning_gym(agent: BlockingAgent, prompt: Any, **columns: Any) -> dict[str, float]:
        """Returns the best score of all attempts, each with its discount."""
        problem = problem_of(prompt, columns)
        verify, scores = get_score_answer_fn(problem["metadata"]["source_dataset"]), list[float]()
        said = prompt
        while len(scores) < settings.max_turns and (not scores or scores[-1] < 1.0):
            reply = agent.chat(said)
            if reply.stop == "limit":
                break
            scores.append(float(verify(answer=reply.text.strip(), entry=problem)))
            said = feedback
        return {KIND: max(score * discount**attempt for attempt, score in enumerate(scores))} if scores else {}

    return reasoning_gym


def problem_of(prompt: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the problem as its family made it. `entry` is its literal (see `tasks/reasoning_gym.py`).

    Raises ValueError for a row that is not of that task."""
    if literal := columns.get("entry"):
        return dict(ast.literal_eval(literal))
    if "source_dataset" not in (columns.get("metadata") or {}):
        raise ValueError(f'environment.kind = "{KIND}" plays the problems of task.kind = "reasoning_gym"; set it')
    return {"question": prompt, "answer": columns["answer"], "metadata": columns["metadata"]}
