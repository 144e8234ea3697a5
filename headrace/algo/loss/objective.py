"""The composed loss of an algorithm, which the trainer computes on every microbatch:

old        the log-probs that ratios are taken against
advantage  the rewards' + the teacher's
loss       the policy loss, a value of `policy/` (or the user's function)
× weight   the correction's and the lag's; zero for tokens that a rule takes out
+ KL       the divergence from the reference
+ teacher  the divergence from the teacher over its top tokens

A token that a rule takes out keeps the last two, unless `algo.denominator = kept` removes it from them too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.loss.corrections import corrected, lag_weight
from headrace.algo.loss.distill import teacher_advantage, top_divergence
from headrace.algo.loss.kl import kl_loss
from headrace.algo.loss.selection import covariance, m2po
from headrace.algo.policy.loss import LossFunction
from headrace.algo.policy.tokens import TokenLoss, Tokens
from headrace.algo.recipe_parts import Distill, Old
from headrace.algo.recipes import Recipe

Objective = Callable[[Tokens], TokenLoss]
"""tokens of a microbatch -> losses per token, which the aggregation weighs and sums."""

Selection = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprob [M_step], sampled [M_step], advantage [M_step]), without gradients -> keep [M_step] bool"""


def objective_of(algo: AlgoConfig) -> Objective:
    """Returns the algorithm's loss. Raises ConfigError if the user's loss function cannot be loaded."""
    recipe = algo.recipe
    return partial(_objective, recipe, recipe.loss.ready(), algo.denominator == "kept")


def selection_of(algo: AlgoConfig) -> Selection | None:
    """Returns the function that makes `Tokens.keep`; None if nothing is selected, so that no forward pass beforehand is
    needed."""
    select = algo.recipe.select
    match select.kind:
        case "none":
            return None
        case "m2po":
            return lambda logprob, sampled, advantage: m2po(logprob, sampled, select.tau)
        case _:
            return partial(covariance, fraction=select.fraction)


def _objective(recipe: Recipe, loss: LossFunction, only_kept: bool, tokens: Tokens) -> TokenLoss:
    tokens = _taught(tokens, recipe.distill)
    old = old_of(tokens, recipe.old)
    policy = loss(tokens, old)
    weight, masked = _weighed(tokens, old, recipe)
    masked |= policy.masked
    out = TokenLoss(policy.loss, policy.clipped, masked).rejected
    total = torch.where(out, 0.0, policy.loss * weight)
    if recipe.kl.coef and recipe.kl.place == "loss":
        assert tokens.reference is not None, "the trainer scores the reference where AlgoConfig.reference_in_loss"
        kl = kl_loss(tokens.logprob, tokens.sampled, tokens.reference, recipe.kl.estimator, recipe.kl.unbiased)
        total = total + recipe.kl.coef * kl
    if recipe.distill.kind in ("forward", "reverse", "jsd") and tokens.top:
        total = total + recipe.distill.coef * top_divergence(tokens.top, recipe.distill)
    if only_kept:  # no part of the loss may count tokens that the denominator leaves out
        total = torch.where(out, 0.0, total)
    return TokenLoss(total, policy.clipped & ~out, masked)


def old_of(tokens: Tokens, old: Old) -> Tensor:
    """[M] the log-probs that ratios are taken against, without gradient.

    trainer: the trainer's own log-prob before the update. A batch gets exactly one update here, so it is the current
    one: exact and at no cost, and every ratio is 1 with its gradient. loglinear: a proximal policy (decoupled PPO,
    arXiv 2110.00641; AReaL, arXiv 2505.24298) one step behind the current one, on the log-linear path from the
    sampler's weights to it: sampled + α·(logprob - sampled), α = (v_prox - v_sampler)/(v_now - v_sampler) = (lag -
    1)/lag (A-3PO, arXiv 2512.06547).
    """
    match old:
        case "sampler":
            return tokens.sampled
        case "trainer":
            return tokens.logprob.detach()
        case "loglinear":
            alpha = torch.clamp(tokens.lag - 1, min=0) / torch.clamp(tokens.lag, min=1)
            return tokens.sampled + alpha * (tokens.logprob.detach() - tokens.sampled)


def _taught(tokens: Tokens, distill: Distill) -> Tokens:
    if distill.kind != "sampled":
        return tokens
    return tokens._replace(advantage=tokens.advantage + distill.coef * teacher_advantage(tokens))


def _weighed(tokens: Tokens, old: Tensor, recipe: Recipe) -> tuple[Tensor, dict[str, Tensor]]:
    x = tokens.logprob.detach() if recipe.old == "sampler" else old
    weight, masked = corrected(x, tokens, recipe.correction)
    by_lag, too_old = lag_weight(tokens.lag, recipe.lag)
    masked |= too_old
    if recipe.select.kind in ("m2po", "clip_cov"):
        assert tokens.keep is not None, "filled in from selection_of"
        masked[recipe.select.kind] = ~tokens.keep
    return weight * by_lag, masked
