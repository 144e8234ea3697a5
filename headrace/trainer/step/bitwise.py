"""`train.parity = "bitwise"`: tokens sampled with the trainer's current weights must have exactly the log-probs that the
trainer computes.

It compares the loss tokens that were sampled with the weights to be trained, using only cache entries of these weights. A
token whose log-prob differs in one bit shows that engine and trainer do not compute the same policy; its batch is not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.core.errors import IdentityError
from headrace.models.lora import LoraConfig
from headrace.native.arithmetic import PROVEN, arithmetic, why_unproven
from headrace.trainer.forward.forward import Forward
from headrace.trainer.forward.fused.fused_mixtures import is_router
from headrace.trainer.kernels import binding
from headrace.trainer.packing import ROOT, Pack

if TYPE_CHECKING:
    from jaxtyping import Float


KINDS = {"norms", "products", "attention", "layers"}
"""The kinds of modules that the kernels must have replaced in every model."""


class UnequalLogprobs(IdentityError):
    """Raised before anything is trained. It does not say where the forward passes differ: that needs the engine's pass too."""

    def __init__(self, message: str, tokens: tuple[int, ...]) -> None:
        super().__init__(message)
        self.tokens = tokens
        """The sequence up to and with the first token whose log-probs differ."""


def shared_arithmetic(
    forward: Forward, fused: tuple[str, ...], dtype: torch.dtype, adapters: Mapping[str, LoraConfig]
) -> tuple[str, str]:
    """(the name of the trainer's forward pass in the words of `native/arithmetic.py`; empty, and why, where it has none).

    `fused`: what `fuse` replaced. `adapters`: those that are trained, by the name that the engine serves them by; without one if it is
    served merged.
    """
    family, precision = forward.model.config.model_type, str(dtype).removeprefix("torch.")
    if family not in PROVEN:
        return "", why_unproven(family, precision, "")
    if reason := _why_adapted(adapters):
        return "", reason
    if not fused:
        return "", "it does not run through the C++ kernels"
    if missing := (KINDS | _kinds_between(forward.model)) - set(fused):
        return "", f"the C++ kernels do not serve this model's {', '.join(sorted(missing))}"
    tier = binding.tier() or "none"
    name = arithmetic(family, precision, tier)
    return name, "" if name else why_unproven(family, precision, tier)


def _kinds_between(model: Any) -> set[str]:
    """The kinds of what lies between attention and attention: dense layers, mixtures of experts, or both."""
    routers = sum(is_router(module) for module in model.modules())
    kinds = {"mixtures"} if routers else set()
    return kinds | {"activations"} if routers < model.config.num_hidden_layers else kinds


def _why_adapted(adapters: Mapping[str, LoraConfig]) -> str:
    """The reason why layers with adapters are not computed as they are served; empty if they are."""
    if "" in adapters or any(lora.merged for lora in adapters.values()):
        return "its adapter is served merged into the weights, with which it is rounded"
    if any(lora.quantise for lora in adapters.values()):
        return "its frozen weights are quantised, and products of these do not run through the C++ kernels"
    if any(lora.experts for lora in adapters.values()):
        return "it trains adapters of experts, which do not run through the C++ kernels"
    return ""


def compare(pack: Pack, logprob: Float[Tensor, " M"], step: int) -> int:
    """`logprob` [M]: the trainer's. Returns how many tokens were compared. Raises UnequalLogprobs."""
    due = (pack.lag == 0) & pack.unmixed
    wrong = (due & (logprob.detach() != pack.sampled)).nonzero()[:, 0]
    if not len(wrong):
        return int(due.sum())
    first = int(wrong[0])
    place, token = int(pack.predictor[first]), int(pack.target[first])
    raise UnequalLogprobs(
        f'step {step} was not trained: with train.parity = "bitwise" the trainer must compute the sampler\'s log-probs of what its '
        f"own weights sampled, bit for bit, and {len(wrong)} of {int(due.sum())} tokens of a microbatch differ. The first is token "
        f"{token}, at place {int(pack.positions[place]) + 1} of its sequence: {float(pack.sampled[first]):.9g} in the engine, "
        f"{float(logprob[first].detach()):.9g} in the trainer",
        (*path_to(pack, place), token),
    )


def path_to(pack: Pack, place: int) -> tuple[int, ...]:
    """The tokens of the sequence that ends at this place of a pack."""
    segment = next(s for s in pack.segments if s.start <= place < s.end)
    tokens = pack.tokens[segment.start : place + 1].tolist()
    while segment.parent != ROOT:
        segment = pack.segments[segment.parent]
        tokens = pack.tokens[segment.start : segment.end].tolist() + tokens
    return tuple(tokens)
