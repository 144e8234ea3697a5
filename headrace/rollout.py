"""One prompt -> G rollouts: requests to the engine, completions to episodes, failures to data."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from headrace.protocols import Engine
from headrace.types import Completion, Episode, Failure, Prompt, Request, Sampling, Turn

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RolloutConfig:
    group_size: int = Field(default=8, gt=0)
    """G: completions of each prompt."""
    max_tokens: int = Field(default=64, gt=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    patience: int = Field(default=200, gt=0)
    """Groups in a row that all failed or had no contrast before the run stops and says why."""

    def sampling(self, seed: int, temperature: float | None = None) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            seed=seed,
        )


def seed_of(*parts: object) -> int:
    """A 63-bit seed from names and numbers, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def boundary(completion: Awaitable[Completion]) -> Completion | Failure:
    """The one place where a failed rollout becomes data. What is not the rollout's own fault propagates."""
    try:
        result = await completion
    except ValueError as error:  # the engine refused the request
        return Failure("request_refused", str(error))
    return Failure("engine_error", result.error) if result.stop == "error" else result


async def roll_out(
    engine: Engine,
    prompt: Prompt,
    count: int,
    sampling: Callable[[int], Sampling],
    decode: Decode,
    name: str,
    priority: int = 0,
) -> list[Episode | Failure]:
    """`count` completions of one prompt, sampled side by side; `sampling(i)` are the settings of the i-th."""
    requests = [Request(f"{name}/{i}", prompt.tokens, sampling(i), priority=priority) for i in range(count)]
    results = await asyncio.gather(*(boundary(engine.generate(request)) for request in requests))
    return [
        result if isinstance(result, Failure) else Episode((Turn(prompt.tokens, _with_text(result, decode)),))
        for result in results
    ]


def _with_text(completion: Completion, decode: Decode) -> Completion:
    return msgspec.structs.replace(completion, text=decode(completion.tokens))
