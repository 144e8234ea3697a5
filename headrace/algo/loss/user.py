"""A user's own loss: `algo.loss = "my.py:name"`. Runs in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.algo.load import load_function
from headrace.algo.loss.tokens import TokenLoss, Tokens
from headrace.errors import ConfigError

RULE = "mine"
"""Under which a user's own masks are counted (`recipes.RULES`)."""


def load_loss(spec: str) -> Callable[[Tokens, Tensor], TokenLoss]:
    """The user's function Tokens -> Tensor [M], or TokenLoss, as a loss. Raises ConfigError."""
    function, tried = load_function(spec, "loss"), False

    def loss(tokens: Tokens, old: Tensor) -> TokenLoss:
        nonlocal tried
        result = _checked(spec, function(tokens), tokens)
        if not tried:  # later on a step that is not finite is skipped, as with any loss
            _finite(spec, result, tokens)
        tried = True
        return result

    return loss


def _finite(spec: str, result: TokenLoss, tokens: Tokens) -> None:
    if not result.loss.isfinite().all() and tokens.logprob.isfinite().all():
        raise ConfigError(
            f"algo.loss = {spec} returned a loss that is not finite for log-probs that are; guard what divides, takes a "
            "logarithm, or an exponential (the log ratio: clamp it)"
        )


def _checked(spec: str, result: Any, tokens: Tokens) -> TokenLoss:
    """Raises ConfigError where it is not a number a token that the gradient can flow through."""
    given = result.loss if isinstance(result, TokenLoss) else result
    if not isinstance(given, Tensor) or given.shape != tokens.logprob.shape:
        what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ConfigError(
            f"algo.loss = {spec} returned {what} for {len(tokens.logprob)} tokens; return a tensor of shape "
            f"({len(tokens.logprob)},), one loss a token, not their sum or mean"
        )
    if tokens.logprob.requires_grad and not given.requires_grad:
        raise ConfigError(f"algo.loss = {spec} has no gradient; compute it from tokens.logprob without detaching it")
    if isinstance(result, TokenLoss):
        masks = list(result.masked.values())
        return result._replace(masked={RULE: torch.stack(masks).any(0)} if masks else {})
    return TokenLoss(given, torch.zeros_like(given, dtype=torch.bool))
