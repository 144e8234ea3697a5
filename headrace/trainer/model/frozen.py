"""A frozen copy of a model, in the dtype of the computation wherever that loses nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def frozen(model: Any, dtype: torch.dtype) -> Any:
    """Returns a copy in evaluation mode that gives the same numbers under autocast to `dtype`."""
    lowered = _lowered_by_autocast(model)
    embedding = model.get_input_embeddings()
    raised = type(embedding) is torch.nn.Embedding and _survives(embedding.weight, dtype)
    if not raised:
        lowered.discard(id(embedding.weight))
    # deepcopy takes the copies of parameters from here, so that there is never a second one in float32
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        low = id(parameter) in lowered or (raised and parameter is embedding.weight)
        value = parameter.detach().to(dtype if low else parameter.dtype, copy=True)
        memo[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
    copied = copy.deepcopy(model, memo).eval()
    if raised and dtype != embedding.weight.dtype:  # autocast does not lower embeddings: later sums are in float32
        original = embedding.weight.dtype
        copied.get_input_embeddings().register_forward_hook(lambda module, args, output: output.to(original))
    return copied


def _lowered_by_autocast(model: Any) -> set[int]:
    """Ids of the parameters that autocast lowers: those of linear layers, and of stacked experts unless transformers multiplies them in
    groups, which autocast does not reach."""
    lowered = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    if getattr(model.config, "_experts_implementation", "eager") == "eager":
        lowered |= {id(p) for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}
    return lowered


def _survives(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds the weight exactly, as it does for most models, which are published in bfloat16."""
    return bool((weight.to(dtype).to(weight.dtype) == weight).all())
