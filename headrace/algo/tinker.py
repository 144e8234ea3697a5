"""The losses that clients of the Tinker API choose by name, with its formulas (tinker-docs.thinkingmachines.ai/tinker/losses).

They are separate from the losses of runs (`policy/`), which bound ratios and divide by a denominator of the step. Here the loss is
the plain sum over all positions of all examples, because the client puts every factor into weights and advantages. Shapes: N positions of one
example, or [N, K]. Settings are read without torch, so torch is imported where it is called by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Inputs = Mapping[str, "Tensor"]
Constants = Mapping[str, float]

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of a ratio: the API states 1 ∓ 0.2 for PPO. Its page on CISPO has the same numbers, in an example."""
UNSTATED = {"clip_low_threshold": math.nan, "clip_high_threshold": math.nan}
"""Bounds that a request has to give. A mean over a sequence is bounded hundreds of times tighter (GSPO's paper: 3e-4 and 4e-4)."""


@dataclass(frozen=True)
class NamedLoss:
    inputs: tuple[str, ...]
    """The tensors that every example has in addition to its target tokens, in the shape of the targets."""
    value: Callable[[Tensor, Inputs, Constants], Tensor]
    """Computes [N] losses from the [N] log-probs of one example's targets, its inputs, and the constants."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Names and defaults of what `loss_fn_config` may set."""
    wide: bool = False
    """Whether a position may have several targets ([N, K])."""

    def with_constants(self, given: Mapping[str, float]) -> dict[str, float]:
        """Returns all constants. Raises ValueError for unknown names and impossible values."""
        if strange := sorted(set(given) - set(self.constants)):
            known = ", ".join(self.constants) or "none"
            raise ValueError(f"loss_fn_config has {strange[0]}, and this loss has the constants: {known}")
        chosen = {**self.constants, **given}
        if missing := [name for name in chosen if math.isnan(chosen[name])]:
            raise ValueError(f"this loss has no default for {missing[0]}; set it in loss_fn_config")
        if bad := [name for name, value in chosen.items() if not math.isfinite(value) or value < 0]:
            raise ValueError(f"loss_fn_config sets {bad[0]} to {chosen[bad[0]]}; it must be a number of at least 0")
        low, high = (chosen.get(name, 0.0) for name in CLIP)
        if low > high:
            raise ValueError(f"clip_low_threshold = {low} is above clip_high_threshold = {high}; exchange them")
        return chosen


def cross_entropy(logprob: Float[Tensor, "*N"], inputs: Inputs, constants: Constants) -> Float[Tensor, "*N"]:
    """-weight · log p"""
    return -logprob * inputs["weights"]


def importance_sampling(logprob: Float[Tensor, "*N"], inputs: Inputs, constants: Constants) -> Float[Tensor, "*N"]:
    """-(p / q) · A"""
    return -_ratio(logprob, inputs) * inputs["advantages"]


def ppo(logprob: Float[Tensor, "*N"], inputs: Inputs, constants: Constants) -> Float[Tensor, "*N"]:
    """-min(r A, clip(r) A) with r = p / q (Schulman et al., arXiv:1707.06347)."""
    return _clipped(_ratio(logprob, inputs), inputs["advantages"], constants)


def cispo(logprob: Float[Tensor, "*N"], inputs: Inputs, constants: Constants) -> Float[Tensor, "*N"]:
    """-sg[clip(p / q)] · log p · A (MiniMax, arXiv:2506.13585)."""
    return -_clip(_ratio(logprob, inputs), constants).detach() * logprob * inputs["advantages"]


def dro(logprob: Float[Tensor, "*N"], inputs: Inputs, constants: Constants) -> Float[Tensor, "*N"]:
    """-(log p · A - beta / 2 · (log p / q)²) (Richemond et al., arXiv:2405.19107)."""
    penalty = 0.5 * constants["beta"] * (logprob - inputs["logprobs"]) ** 2
    return penalty - logprob * inputs["advantages"]


def gspo(logprob: Float[Tensor, "*N"], inputs: Inputs, constants: Constants) -> Float[Tensor, "*N"]:
    """PPO's bound on the geometric mean of the ratios of the marked positions; each position has the gradient of its own log-prob
    (GSPO-token; Zheng et al., arXiv:2507.18071)."""
    marked = inputs["sequence_ratio_mask"] != 0
    fixed = logprob.detach()
    mean = (fixed - inputs["logprobs"])[marked].mean()
    return _clipped((mean + logprob - fixed).exp(), inputs["advantages"], constants)


def _ratio(logprob: Float[Tensor, "*N"], inputs: Inputs) -> Float[Tensor, "*N"]:
    return (logprob - inputs["logprobs"]).exp()


def _clip(ratio: Float[Tensor, "*N"], constants: Constants) -> Float[Tensor, "*N"]:
    return ratio.clamp(constants["clip_low_threshold"], constants["clip_high_threshold"])


def _clipped(ratio: Float[Tensor, "*N"], advantages: Float[Tensor, "*N"], constants: Constants) -> Float[Tensor, "*N"]:
    import torch

    return -torch.minimum(ratio * advantages, _clip(ratio, constants) * advantages)


_POLICY = ("logprobs", "advantages")

LOSSES = {
    "cross_entropy": NamedLoss(("weights",), cross_entropy, wide=True),
    "importance_sampling": NamedLoss(_POLICY, importance_sampling),
    "ppo": NamedLoss(_POLICY, ppo, CLIP),
    "cispo": NamedLoss(_POLICY, cispo, CLIP),
    "dro": NamedLoss(_POLICY, dro, {"beta": 0.05}),
    "gspo": NamedLoss((*_POLICY, "sequence_ratio_mask"), gspo, UNSTATED),
}
"""The losses that are served, by the API's names."""
