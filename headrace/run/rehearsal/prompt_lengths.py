"""The lengths of the first prompts of a task, with the chat template applied."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.protocols import Task
from headrace.core.types import Prompt

LOOKED_AT = 128
"""Prompts that are looked at, in the order of the run."""


class PromptLengths(NamedTuple):
    """Tokens of the prompts that were looked at, and how many are too long."""

    shortest: int
    median: int
    longest: int
    too_long: int
    looked_at: int


def first_prompts(task: Task, held_out: int) -> list[Prompt]:
    """Returns the first prompts to be trained on, then held-out ones. The state of the task is restored."""
    state = task.state()
    drawn = [task.draw() for _ in range(LOOKED_AT)]
    distinct: dict[tuple[int, ...], Prompt] = {}
    for prompt in drawn:
        distinct.setdefault(prompt.tokens, prompt)  # a short file starts over
    task.restore(state)
    return [*distinct.values(), *itertools.islice(task.held_out(held_out), LOOKED_AT)]


def lengths(prompts: Sequence[Prompt], room: int) -> PromptLengths:
    """Summarises the lengths. `room`: tokens that a prompt may have."""
    counts = [len(prompt.tokens) for prompt in prompts]
    long = sum(count > room for count in counts)
    return PromptLengths(min(counts), int(statistics.median(counts)), max(counts), long, len(counts))


def length_problem(found: PromptLengths, max_tokens: int, context: int, positions: int) -> str:
    """Returns an empty string, or a sentence about prompts that are too long. `context`: engine.context_length; `positions`: those of the
    model, 0 if unknown."""
    if not found.too_long:
        return ""
    wanted = found.longest + max_tokens
    beyond = positions and wanted > positions
    how = f"this model has {positions} positions: " if beyond else f"raise engine.context_length to {wanted}, "
    which = "all" if found.too_long == found.looked_at else f"{found.too_long} of {found.looked_at}"
    return (
        f"{which} prompts that were looked at are too long ({found.shortest} to {found.longest} tokens with the chat template, median "
        f"{found.median}): with rollout.max_tokens = {max_tokens} they do not fit into {min(context, positions or context)} tokens; {how}"
        "shorten the prompts, or lower rollout.max_tokens"
    )
