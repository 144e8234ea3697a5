"""Adapters (LoRA, DoRA) of linear layers that several ranks compute together.

An adapter is small: every rank holds its A and B whole, and computes with the part of them that fits its part of the layer.

    layer split by results    every rank has all of x and makes some of the results: with its rows of B. The gradient of A x is summed over ranks
    layer split by inputs     every rank has some of x and adds to all results: with its columns of A. A x is summed over ranks

So what travels has the adapter's rank in numbers a token, not the width of the layer. peft would add B(A(x)), as wide as the whole layer,
to a rank's part of it. The gradient of what was used in parts (first case: B and DoRA's lengths; second: A) covers these parts, and has to be summed
over the ranks once a step; all other gradients are whole, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from headrace.core.errors import ConfigError
from headrace.trainer.model.low_memory import local

BASE = "base_layer"
"""The name that peft gives to the layer within an adapter's."""

WHOLE = {"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "replicate"}
"""Styles of transformers' plans whose layers take and return the whole: peft's own forward is right."""


def split_adapters(model: Any, styles: Mapping[str, str], group: dist.ProcessGroup) -> list[str]:
    """Makes adapters compute beside layers that are split over `group`. `styles`: how each adapted layer is split. Returns the names of the
    parameters whose gradients have to be summed over the group. Raises ConfigError for a layer that is split in another way."""
    summed: list[str] = []
    for name, style in styles.items():
        if style in WHOLE:
            continue
        if style not in ("colwise", "rowwise"):
            raise ConfigError(
                f"lora.targets has {name.rpartition('.')[2]}, which the plan of {type(model).__name__} splits over ranks as {style}, and an adapter "
                "beside that is not there; leave it out of lora.targets, or use train.parallel.shard instead of tensor"
            )
        layer = model.get_submodule(name)
        layer.forward = _forward_of(layer, _by_results if style == "colwise" else _by_inputs, group)
        parts = ("lora_B.", "lora_magnitude_vector.") if style == "colwise" else ("lora_A.",)
        summed += [f"{name}.{own}" for own, _ in layer.named_parameters() if own.startswith(parts)]
    return summed


Product = Callable[[Any, str, Tensor, dist.ProcessGroup], tuple[Tensor, Tensor, Tensor | None]]
"""(layer, adapter, x, group) -> x A^T B^T of this rank's results [..., n]; and for DoRA, without gradient, the length of each row of W + BA [n], and with
gradient, the lengths that are trained [n]."""


def _forward_of(layer: Any, product: Product, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of an adapted layer, as peft's, of this rank's part."""

    def forward(x: Tensor) -> Tensor:
        result: Tensor = layer.base_layer(x)
        if layer.disable_adapters:
            return result
        dtype = result.dtype
        for name in layer.active_adapters:
            if name not in layer.lora_A:
                continue
            added, length, trained = product(layer, name, x.to(layer.lora_A[name].weight.dtype), group)
            added = added * layer.scaling[name]
            if trained is None:
                result = result + added
                continue
            bias, scale = layer.base_layer.bias, trained / length
            product_alone = result if bias is None else result - local(bias)
            result = result + (scale - 1) * product_alone + scale * added
        return result.to(dtype)

    return forward


def _by_results(layer: Any, name: str, x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b, weight = layer.lora_A[name].weight, layer.lora_B[name].weight, local(layer.base_layer.weight)
    start, count = dist.get_rank(group) * len(weight), len(weight)
    rows = b.narrow(0, start, count)
    added = linear(_SumGradients.apply(linear(x, a), group), rows)
    if not layer.use_dora[name]:
        return added, added, None
    with torch.no_grad():
        length = _moved(weight.to(x.dtype), rows, a, layer.scaling[name]).norm(dim=1)
    return added, length, layer.lora_magnitude_vector[name].weight.narrow(0, start, count)


def _by_inputs(layer: Any, name: str, x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b, weight = layer.lora_A[name].weight, layer.lora_B[name].weight, local(layer.base_layer.weight)
    count = weight.shape[1]
    columns = a.narrow(1, dist.get_rank(group) * count, count)
    added = linear(_Sum.apply(linear(x, columns), group), b)
    if not layer.use_dora[name]:
        return added, added, None
    with torch.no_grad():
        squares = _moved(weight.to(x.dtype), b, columns, layer.scaling[name]).square().sum(dim=1)
        dist.all_reduce(squares, group=group)
    return added, squares.sqrt(), layer.lora_magnitude_vector[name].weight


def _moved(weight: Tensor, b: Tensor, a: Tensor, scaling: float) -> Tensor:
    """This rank's part of W + BA. DoRA (arXiv 2402.09353, 4.3) takes its lengths for constants."""
    return weight + scaling * (b @ a).to(weight.dtype)


class _Sum(torch.autograd.Function):
    """Summed over ranks; the gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _SumGradients(torch.autograd.Function):
    """The same on all ranks; its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        summed = gradient.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
