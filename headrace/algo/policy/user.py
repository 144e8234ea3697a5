"""A user's own loss: `algo.loss = "my.py:name"`. The function runs in the trainer; settings know its name without
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import Loss, LossFunction, Reach
from headrace.algo.policy.tokens import TokenLoss, Tokens, unclipped
from headrace.algo.user_functions import load_function
from headrace.core.errors import ConfigError
from headrace.settings.strict import STRICT

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

RULE = "mine"
"""The name under which a user's own masks are counted (`recipes.REASONS`)."""


@dataclass(frozen=True, config=STRICT)
class UserLoss(Loss):
    """A function Tokens -> Tensor [M], or TokenLoss. It is assumed to keep the policy near the sampler's."""

    name: ClassVar[str] = "file.py:name"
    anchored: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    rejects: ClassVar[bool] = True
    reach: ClassVar[Reach] = "sequence"
    spec: str
    """`file.py:name`. It has no constants."""

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return self.spec

    def ready(self) -> LossFunction:
        """Raises ConfigError if the function cannot be loaded; at its first call, if its result cannot be used."""
        function, tried = load_function(self.spec, "loss"), False

        def loss(tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
            nonlocal tried
            result = _checked(self.spec, function(tokens), tokens)
            if not tried:  # later on a step that is not finite is skipped, as with any loss
                _finite(self.spec, result, tokens)
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
    """Raises ConfigError if the result is not one number per token that the gradient can flow through."""
    import torch

    given = result.loss if isinstance(result, TokenLoss) else result
    if not isinstance(given, torch.Tensor) or given.shape != tokens.logprob.shape:
        what = (
            f"a tensor of shape {tuple(given.shape)}"
            if isinstance(given, torch.Tensor)
            else f"a {type(given).__name__}"
        )
        raise ConfigError(
            f"algo.loss = {spec} returned {what} for {len(tokens.logprob)} tokens; return a tensor of shape "
            f"({len(tokens.logprob)},), one loss a token, not their sum or mean"
        )
    if tokens.logprob.requires_grad and not given.requires_grad:
        raise ConfigError(f"algo.loss = {spec} has no gradient; compute it from tokens.logprob without detaching it")
    if isinstance(result, TokenLoss):
        masks = list(result.masked.values())
        return result._replace(masked={RULE: torch.stack(masks).any(0)} if masks else {})
    return unclipped(given)
