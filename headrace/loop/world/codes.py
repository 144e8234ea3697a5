"""The codes in simulated tokens. Nothing reads these tokens as text, so they carry the values that the simulation needs.

One simulated token stands for `grain` real ones, so that an hour of a thousand GPUs, which is billions of tokens, passes through the
real pipeline in seconds. Times are computed from real lengths; only the lag is coarse, with a resolution of `grain` tokens.

    prompt      (number, real length, difficulty code)
    completion  (real length, 0, 0, ...): ceil(length / grain) tokens
    result      (real length, mark): what lies between two turns; the mark makes it a sequence of its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from headrace.core.batches import Row
from headrace.core.types import Scored
from headrace.loop.world.distributions import normal_quantile

_SCALE = 1 << 30
PROMPT = 3
"""Simulated tokens of a prompt."""
RESULT = 2
"""Simulated tokens of a result."""


def prompt_tokens(number: int, length: float, u: float) -> tuple[int, int, int]:
    """Encodes a prompt. `u`: uniform in (0, 1), its rank by difficulty."""
    return number, max(1, round(length)), int(u * _SCALE)


@lru_cache(maxsize=1 << 14)  # called for every rollout of a group
def difficulty(prompt: tuple[int, ...]) -> float:
    """Returns the difficulty of a prompt, standard normal."""
    return normal_quantile((prompt[2] + 0.5) / _SCALE)


def result_tokens(length: float, seed: int, number: int) -> tuple[int, int]:
    """Encodes the result before turn `number` of a rollout. `seed`: of its environment."""
    return max(1, round(length)), hash((seed, number))


def completion_tokens(length: int, grain: int) -> tuple[int, ...]:
    return (length, *(0,) * (-(-length // grain) - 1))


class CodePart(NamedTuple):
    """A completion or a result in a sequence of codes."""

    real: int
    """Real tokens."""
    start: int
    end: int
    """Its simulated tokens are those from `start` on and before `end`."""
    sampled: bool


def parts_of(codes: Sequence[int], grain: int, start: int = 0) -> Iterator[CodePart]:
    """Yields what the codes from `start` on stand for: completions, with a result between two of them."""
    sampled = True
    while start < len(codes):
        end = min(start + (-(-codes[start] // grain) if sampled else RESULT), len(codes))
        yield CodePart(min(codes[start], (end - start) * grain) if sampled else codes[start], start, end, sampled)
        start, sampled = end, not sampled


def context_length(prompt: Sequence[int], grain: int) -> int:
    """Returns the real tokens of a request's prompt: those of the prompt itself, and of all turns and results behind it."""
    if len(prompt) < PROMPT:
        return len(prompt)  # of the probe, which is no code
    return prompt[1] + sum(part.real for part in parts_of(prompt, grain, PROMPT))


def real_tokens(row: Row, grain: int) -> int:
    """Returns the real tokens that the row stands for: sampled ones and results."""
    return sum(part.real for part in parts_of(row.tokens, grain))


def loss_tokens(row: Row, grain: int) -> int:
    """Returns the sampled ones in the loss."""
    total = 0.0
    for part in parts_of(row.tokens, grain):
        total += part.real * sum(row.mask[part.start : part.end]) / (part.end - part.start)
    return round(total)


def shared_again(one: Scored, grain: int) -> int:
    """Returns the real tokens that the rows of a rollout that branches repeat: the turns before the fork, and what lies before its first turn,
    in all rows but the first."""
    if not one.branches:
        return 0
    turns, pivot = one.episode.turns, one.branches[0].first
    sampled = sum(min(turn.completion.tokens[0], len(turn.completion.tokens) * grain) for turn in turns[:pivot])
    read = sum(turn.context[0] for turn in turns[1 : pivot + 1])
    return (len(one.branches) - 1) * (sampled + read)
