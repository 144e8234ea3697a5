"""Checks of requests. Every refusal gives its reason and names its remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.core.types import Request, Sampling

COLDEST = 1e-5
"""Logits divided by less could overflow."""
HOTTEST = 1e30
"""Divided by more than a float32 holds, masked logits are no numbers."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits that requests are checked against."""

    context_length: int
    vocabulary: int
    stop_strings: bool
    routing: bool

    def check(self, request: Request, context: int) -> None:
        """Raises ValueError if the request can never run. `context`: tokens of its prompt, or of the sequence that it forks."""
        _check_tokens(request.prompt, self.vocabulary)
        _check_tokens(request.prefix, self.vocabulary)
        if not context:
            raise ValueError("the prompt has no tokens; begin it with a start token at least")
        _check_sampling(request.sampling)
        self._check_length(request, context)
        self._check_wishes(request)

    def _check_length(self, request: Request, context: int) -> None:
        most = request.sampling.max_tokens
        if context + most > self.context_length:
            raise ValueError(
                f"a prompt of {context} tokens and max_tokens = {most} need {context + most} tokens, the engine's context "
                f"holds {self.context_length}; shorten the prompt, lower max_tokens or raise engine.context_length"
            )
        if len(request.prefix) > most:
            raise ValueError(f"a prefix of {len(request.prefix)} tokens exceeds max_tokens = {most}; raise max_tokens")
        if not most and not request.prompt_logprobs:
            raise ValueError("max_tokens = 0 samples nothing; raise it, or set prompt_logprobs to score the prompt")

    def _check_wishes(self, request: Request) -> None:
        if biased := request.sampling.logit_bias:
            _check_tokens(tuple(token for token, _ in biased), self.vocabulary)
        if biased and request.return_mask:
            raise ValueError(
                "logit_bias changes the distribution, which no mask can tell a trainer: leave one of them out"
            )
        if request.sampling.stop and not self.stop_strings:
            raise ValueError("stop strings need the model's tokenizer, which its directory lacks; use stop_token_ids")
        if not 0 <= request.top_logprobs <= self.vocabulary:
            raise ValueError(
                f"top_logprobs = {request.top_logprobs} cannot be returned; it must be 0 to {self.vocabulary}, the vocabulary"
            )
        if request.return_routing and not self.routing:
            raise ValueError(
                "return_routing needs engine.routing = true (and a model with experts); set it, or do not ask"
            )
        if request.fork and (request.prompt or request.prefix or request.prompt_logprobs or request.adapter):
            raise ValueError(
                "a fork has the prompt and the adapter of its source; leave prompt, prefix, prompt_logprobs and adapter empty"
            )


def _check_tokens(tokens: tuple[int, ...], vocabulary: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(
            f"token {wrong} is not in the model's vocabulary of {vocabulary}; use the model's own tokenizer"
        )


def _is_temperature(value: float) -> bool:
    return math.isfinite(value) and (value == 0 or value >= COLDEST)


def _check_sampling(sampling: Sampling) -> None:
    rules = [
        (sampling.max_tokens >= 0, "max_tokens", "at least 0"),
        (_is_temperature(sampling.temperature), "temperature", f"0 (greedy) or at least {COLDEST}"),
        (sampling.temperature <= HOTTEST, "temperature", f"at most {HOTTEST:g}"),
        (0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps all tokens)"),
        (sampling.top_k >= 0, "top_k", "0 (keeps all tokens) or more"),
        (0 <= sampling.min_p <= 1, "min_p", "from 0 (keeps all tokens) to 1"),
        ("" not in sampling.stop, "stop", "strings that are not empty"),
        (all(math.isfinite(bias) for _, bias in sampling.logit_bias), "logit_bias", "of finite numbers"),
    ]
    for ok, name, wanted in rules:
        if not ok:
            raise ValueError(f"{name} = {getattr(sampling, name)} cannot be sampled with; it must be {wanted}")
