"""Reward functions that come with headrace."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.episodes.scoring.job import fail_raised
from headrace.settings.extras import absent


@cache
def _verifier(family: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(family)


def load_reasoning_gym() -> Callable[..., Any]:
    try:
        import reasoning_gym  # noqa: F401  at start, so that the first group does not wait for it
    except ImportError as error:
        asked = "the reward reasoning_gym"
        raise ConfigError(absent(asked, "reasoning-gym", "reasoning_gym", error, "tasks")) from None
    return reasoning_gym_reward


def reasoning_gym_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    answer: Sequence[Any],
    entry: Sequence[str | None] = (),
) -> list[float | Failure]:
    """Applies each family's own verifier (0 to 1) to the completion without surrounding white space.

    If a verifier raises, only that completion fails: it is not known to be wrong.
    """
    literals = entry or [None] * len(completions)
    rows = zip(prompts, completions, metadata, answer, literals, strict=True)
    return [
        _score(completion.strip(), _entry(prompt, meta, right, literal))
        for prompt, completion, meta, right, literal in rows
    ]


def _entry(prompt: str, metadata: dict[str, Any], answer: Any, literal: str | None) -> dict[str, Any]:
    return ast.literal_eval(literal) if literal else {"question": prompt, "answer": answer, "metadata": metadata}


def _score(completion: str, entry: dict[str, Any]) -> float | Failure:
    try:
        return float(_verifier(entry["metadata"]["source_dataset"])(answer=completion, entry=entry))
    except Exception as error:
        return fail_raised(error)
