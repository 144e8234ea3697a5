"""A frozen base in 8 or 4 bits (QLoRA: Dettmers et al., arXiv:2305.14314), in blocks that share a scale.

Only weights are quantised: a layer's matrix is expanded where it is used, once in the forward and once in the backward pass, and the
result is never kept. The expanded matrices are the model that adapters are trained on, and that the engine is given.

This replaces bitsandbytes (0.50): on a CPU its NF4 mixes up the scales of rows whose length is no multiple of a block, and it compiles its
kernels again for every shape.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Kind = Literal["int8", "nf4"]

BLOCK = 64
"""Number of weights that share a float32 scale, the largest magnitude among them: 0.06 bytes per weight."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to [-1, 1] with a zero among them (appendix E of the paper)."""

LEVELS = {"nf4": torch.tensor(NF4), "int8": torch.arange(-127, 128) / 127}


class QuantisedLinear(torch.nn.Linear):
    """A linear layer whose `weight` is packed bytes; `full` expands them."""

    def __init__(self, linear: torch.nn.Linear, kind: Kind, dtype: torch.dtype) -> None:
        """`dtype`: the dtype of the computation."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self._dtype = dtype
        packed, scale = pack(linear.weight.detach(), kind)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self._scale, self._table = scale, table_of(kind).to(packed.device)

    def full(self) -> Tensor:
        """[out, in] float32"""
        values = torch.nn.functional.embedding(self.weight.int(), self._table).view(-1, BLOCK) * self._scale
        return values.view(-1)[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        out = _Product.apply(x.to(self._dtype), self)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def pack(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Returns (bytes, scales [blocks, 1] float32): the nearest level of every weight; nf4 has two per byte, the first in the high half."""
    levels = LEVELS[kind].to(weight.device)
    padded = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % BLOCK))
    blocks = padded.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    middles = (levels[1:] + levels[:-1]) / 2
    found = torch.bucketize(blocks / scale.clamp(min=torch.finfo(torch.float32).tiny), middles).view(-1)
    if kind == "nf4":
        found = found[::2] * 16 + found[1::2]
    return found.to(torch.uint8), scale


def table_of(kind: Kind) -> Tensor:
    """[256, weights per byte]: the values of a byte before they are scaled."""
    levels = LEVELS[kind]
    if kind == "nf4":
        return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return torch.cat([levels, levels.new_zeros(1)])[:, None]


class _Product(torch.autograd.Function):
    """x -> x Wᵀ. Only the packed W is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.full().to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.full().to(grad.dtype), None


def quantise(model: Any, kind: Kind, dtype: torch.dtype) -> dict[str, QuantisedLinear]:
    """Replaces every linear layer except the output head, in place. Returns the new layers by the names of their weights."""
    head = model.get_output_embeddings()
    quantised: dict[str, QuantisedLinear] = {}
    linears = [(name, one) for name, one in model.named_modules() if type(one) is torch.nn.Linear and one is not head]
    for name, linear in linears:
        parent, _, last = name.rpartition(".")
        quantised[f"{name}.weight"] = layer = QuantisedLinear(linear, kind, dtype)
        setattr(model.get_submodule(parent), last, layer)
    return quantised
