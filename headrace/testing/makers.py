"""Small nouns by hand, for tests: each is whole and valid, and what is not named has the plainest value there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.core.batches import Group, Row
from headrace.core.types import Completion, Episode, Prompt, Request, Sampling, Scored, Stop, Turn, VersionSpan
from headrace.core.weights import WeightUpdate


def request(name: str, prompt: Iterable[int] = (1, 2), tokens: int = 8, *, seed: int = 0, **options: Any) -> Request:
    """A request for exactly `tokens` tokens, unless a stop string ends it. `options`: other fields of `Request`."""
    return Request(name, tuple(prompt), Sampling(max_tokens=tokens, seed=seed, ignore_eos=True), **options)


def prompt(number: int = 0, tokens: Sequence[int] = (1, 2)) -> Prompt:
    return Prompt(f"p{number}", f"question {number}", tuple(tokens))


def completion(tokens: Sequence[int], version: int = 0, stop: Stop = "stop") -> Completion:
    """Tokens of one version, each with log-prob -1."""
    return Completion(tuple(tokens), (-1.0,) * len(tokens), (VersionSpan(0, version, version),), stop)


def scored(sampled: Completion, reward: float = 1.0, context: Sequence[int] = (1, 2)) -> Scored:
    """An episode of one turn."""
    return Scored(Episode((Turn(tuple(context), sampled),)), reward, {"reward": reward})


def row(tokens: Sequence[int], versions: Sequence[int] | int = 0, *, advantage: float = 1.0, **more: Any) -> Row:
    """A training row in which every token has log-prob -1, the same advantage, and is in the loss. `versions`: of each token, or
    of all. `more`: other fields of `Row`, or other values for these."""
    count = len(tokens)
    fields: dict[str, Any] = {
        "prompt": (1, 2),
        "tokens": tuple(tokens),
        "logprobs": (-1.0,) * count,
        "advantages": (advantage,) * count,
        "mask": (True,) * count,
        "versions": (versions,) * count if isinstance(versions, int) else tuple(versions),
    }
    return Row(**fields | more)


def group(ticket: int, *rows: Row, **more: Any) -> Group:
    """A finished group. `more`: other fields of `Group`, or other values for these."""
    fields: dict[str, Any] = {"prompt": prompt(ticket), "scored": (), "rows": rows}
    return Group(ticket, **fields | more)


def update(version: int, fingerprint: str = "fake") -> WeightUpdate:
    """Full weights of that version, as `FakeTrainer` publishes them. `fingerprint`: its beginning, before the version."""
    return WeightUpdate(version=version, kind="full", fingerprint=f"{fingerprint}-{version}", nbytes=0, seconds=0.0)
