"""The codes in simulated tokens. Nothing reads these tokens as text, so they carry the values that the simulation needs.

One simulated token stands for `grain` real ones, so that an hour of a thousand GPUs, which is billions of tokens, passes through the
real pipeline in seconds. Times are computed from real lengths; only the lag is coarse, with a resolution of `grain` tokens.

    prompt      (number, real length, difficulty code)
    completion  (real length, 0, 0, ...): ceil(length / grain) tokens
"""

from __future__ import annotations

from functools import lru_cache

from headrace.simulate.distributions import normal_quantile
from headrace.types import Row

_SCALE = 1 << 30


def prompt_tokens(number: int, length: float, u: float) -> tuple[int, int, int]:
    """Encodes a prompt. `u`: uniform in (0, 1), its rank by difficulty."""
    return number, max(1, round(length)), int(u * _SCALE)


@lru_cache(maxsize=1 << 14)  # called for every rollout of a group
def difficulty(prompt: tuple[int, ...]) -> float:
    """Returns the difficulty of a prompt, standard normal."""
    return normal_quantile((prompt[2] + 0.5) / _SCALE)


def completion_tokens(length: int, grain: int) -> tuple[int, ...]:
    return (length, *(0,) * (-(-length // grain) - 1))


def real_tokens(row: Row, grain: int) -> int:
    """Returns the sampled real tokens that the row stands for."""
    return min(row.tokens[0], len(row.tokens) * grain) if row.tokens else 0


def loss_tokens(row: Row, grain: int) -> int:
    """Returns those of them that are in the loss."""
    return round(real_tokens(row, grain) * sum(row.mask) / len(row.mask)) if row.mask else 0
