"""A request that samples nothing: it asks for the log-probs of tokens that are there."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.types import Request, Sampling


def scoring(request_id: str, tokens: Sequence[int], priority: int = 0, adapter: str = "") -> Request:
    """Makes a request for the log-probs of `tokens` (`Completion.prompt_logprobs`) that samples nothing."""
    return Request(
        request_id, tuple(tokens), Sampling(max_tokens=0), priority=priority, adapter=adapter, prompt_logprobs=True
    )
