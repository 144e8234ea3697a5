"""A module of a model as the kernels know it: a linear layer, alone or with one of peft's adapters; an activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.trainer.forward.fused.fused_products import LinearLayer, LowRankPair


def factors() -> torch.dtype:
    """The dtype of the factors of products: what autocast asks for."""
    low = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return torch.bfloat16 if low else torch.float32


def is_gelu(function: Any) -> bool | None:
    """Whether it is GELU's tanh form, or SiLU; None if neither."""
    x = torch.linspace(-6, 6, 97)
    for gelu, known in ((False, nn.functional.silu(x)), (True, nn.functional.gelu(x, approximate="tanh"))):
        if callable(function) and torch.allclose(function(x), known, rtol=1e-5, atol=1e-6):
            return gelu
    return None


def layer_of(module: Any) -> LinearLayer | None:
    """The linear layer that is all that a module computes, with what its active adapter adds; None for any other module.

    `packed` marks the modules whose products are to go through the kernels.
    """
    base = getattr(module, "base_layer", module)
    if type(base) is not nn.Linear or not hasattr(base, "packed"):
        return None
    packed: Any = base.packed
    layer = LinearLayer(packed, base.weight, base.bias)
    if base is module:
        return layer
    if not hasattr(module, "lora_variant") or module.merged:
        return None
    names = [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return layer
    return layer._replace(low_rank=_low_rank(module, names[0])) if _is_plain(module, names) else None


def _is_plain(module: Any, names: list[str]) -> bool:
    """Whether one adapter is active, and is two matrices and a factor: no DoRA, no dropout, no bias."""
    name, *others = names
    return (
        not others
        and name not in module.lora_variant
        and type(module.lora_dropout[name]) is nn.Identity
        and module.lora_B[name].bias is None
    )


def _low_rank(module: Any, name: str) -> LowRankPair:
    return LowRankPair(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
