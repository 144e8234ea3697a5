"""What an engine accepts, and why not. Every refusal names its remedy."""

from __future__ import annotations

import math

from headrace.engine.native.stopping import Decode
from headrace.types import Request, Sampling

COLDEST = 1e-5
"""Logits divided by less could overflow."""


def check(request: Request, context_length: int, vocabulary: int, decode: Decode | None) -> None:
    """Raises ValueError when the request can never run."""
    check_tokens(request.prompt, vocabulary)
    check_tokens(request.prefix, vocabulary)
    if not request.prompt:
        raise ValueError("the prompt has no tokens; begin it with a start token at least")
    _check_sampling(request.sampling)
    wanted = len(request.prompt) + request.sampling.max_tokens
    if wanted > context_length:
        raise ValueError(
            f"a prompt of {len(request.prompt)} tokens and max_tokens = {request.sampling.max_tokens} need {wanted} tokens, "
            f"the engine's context holds {context_length}; shorten the prompt, lower max_tokens or raise engine.context_length"
        )
    if len(request.prefix) > request.sampling.max_tokens:
        raise ValueError(
            f"a prefix of {len(request.prefix)} tokens exceeds max_tokens = {request.sampling.max_tokens}; raise max_tokens"
        )
    if request.sampling.stop and decode is None:
        raise ValueError("stop strings need the model's tokenizer, which its directory lacks; use stop_token_ids")


def check_tokens(tokens: tuple[int, ...], vocabulary: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(
            f"token {wrong} is not in the model's vocabulary of {vocabulary}; use the model's own tokenizer"
        )


def _is_temperature(value: float) -> bool:
    return math.isfinite(value) and (value == 0 or value >= COLDEST)


def _check_sampling(sampling: Sampling) -> None:
    rules = [
        (sampling.max_tokens >= 1, "max_tokens", "at least 1"),
        (_is_temperature(sampling.temperature), "temperature", f"0 (greedy) or at least {COLDEST}"),
        (0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps all tokens)"),
        (sampling.top_k >= 0, "top_k", "0 (keeps all tokens) or more"),
        (0 <= sampling.min_p <= 1, "min_p", "from 0 (keeps all tokens) to 1"),
        ("" not in sampling.stop, "stop", "strings that are not empty"),
    ]
    for ok, name, wanted in rules:
        if not ok:
            raise ValueError(f"{name} = {getattr(sampling, name)} cannot be sampled with; it must be {wanted}")
