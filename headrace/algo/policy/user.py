"""A user's own loss: `algo.loss = "my.py:name"`, of tokens or, with pairs of rollouts as the advantage, of pairs. The function runs in the trainer;
settings know its name without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.dataclasses import dataclass

from headrace.algo.policy.loss import Loss, LossFunction, Reach
from headrace.algo.policy.pairs import PairLoss, Side
from headrace.algo.policy.tokens import TokenLoss, Tokens, unclipped
from headrace.core.errors import ConfigError
from headrace.settings.strict import STRICT
from headrace.settings.user_code import load_function

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

RULE = "mine"
"""The name under which a user's own masks are counted (`recipes.REASONS`)."""


class _OfAFile:
    """A loss that has its name from a file of the user's, and no constants."""

    spec: str

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return self.spec


@dataclass(frozen=True, config=STRICT)
class UserLoss(_OfAFile, Loss):
    """A function Tokens -> Tensor [M], or TokenLoss. It is assumed to keep the policy near the sampler's."""

    name: ClassVar[str] = "file.py:name"
    anchored: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    rejects: ClassVar[bool] = True
    reach: ClassVar[Reach] = "sequence"
    spec: str
    """`file.py:name`."""

    def ready(self) -> LossFunction:
        """Raises ConfigError if the function cannot be loaded; at its first call, if its result cannot be used."""
        function, tried = load_function(self.spec, f"algo.loss = {self.spec}", arguments=1), False

        def loss(tokens: Tokens, old: Float[Tensor, " M"]) -> TokenLoss:
            nonlocal tried
            result = _checked(self.spec, function(tokens), tokens)
            if not tried:  # later on a step that is not finite is skipped, as with any loss
                _finite(self.spec, result, tokens)
            tried = True
            return result

        return loss


@dataclass(frozen=True, config=STRICT)
class UserPairLoss(_OfAFile, PairLoss):
    """A function (chosen, rejected) -> Tensor [K], each a `pairs.Side` of K rollouts. The reference is held for it, whether it reads it or not."""

    name: ClassVar[str] = "file.py:name"
    needs_reference: ClassVar[bool] = True
    spec: str
    """`file.py:name`."""

    def ready(self) -> LossFunction:
        """Raises ConfigError if the function cannot be loaded; at its first call, if its result cannot be used."""
        function, tried = load_function(self.spec, f"algo.loss = {self.spec}", arguments=2), False

        def of_pairs(chosen: Side, rejected: Side) -> Float[Tensor, " K"]:
            nonlocal tried
            if not len(chosen.tokens):
                return chosen.logprob
            found = _of_shape(self.spec, function(chosen, rejected), chosen.logprob, "pairs")
            if not tried and not found.isfinite().all() and (chosen.logprob + rejected.logprob).isfinite().all():
                raise _not_finite(self.spec)
            tried = True
            return found

        return lambda tokens, old: self.spread(tokens, of_pairs)


def _finite(spec: str, result: TokenLoss, tokens: Tokens) -> None:
    if not result.loss.isfinite().all() and tokens.logprob.isfinite().all():
        raise _not_finite(spec)


def _not_finite(spec: str) -> ConfigError:
    return ConfigError(
        f"algo.loss = {spec} returned a loss that is not finite for log-probs that are; guard what divides, takes a "
        "logarithm, or an exponential (the log ratio: clamp it)"
    )


def _checked(spec: str, result: Any, tokens: Tokens) -> TokenLoss:
    import torch

    given = _of_shape(spec, result.loss if isinstance(result, TokenLoss) else result, tokens.logprob, "tokens")
    if isinstance(result, TokenLoss):
        masks = list(result.masked.values())
        return result._replace(masked={RULE: torch.stack(masks).any(0)} if masks else {})
    return unclipped(given)


def _of_shape(spec: str, given: Any, like: Tensor, what_for: str) -> Tensor:
    """Raises ConfigError if the result is not one number per token, or pair, that the gradient can flow through."""
    import torch

    if not isinstance(given, torch.Tensor) or given.shape != like.shape:
        what = (
            f"a tensor of shape {tuple(given.shape)}"
            if isinstance(given, torch.Tensor)
            else f"a {type(given).__name__}"
        )
        raise ConfigError(
            f"algo.loss = {spec} returned {what} for {len(like)} {what_for}; return a tensor of shape ({len(like)},), one loss a "
            f"{what_for.removesuffix('s')}, not their sum or mean"
        )
    if like.requires_grad and not given.requires_grad:
        source = "tokens.logprob" if what_for == "tokens" else "chosen.logprob and rejected.logprob"
        raise ConfigError(f"algo.loss = {spec} has no gradient; compute it from {source} without detaching it")
    return given
