"""Products of linear layers by the kernels, with what adapters add to them; gradients of weights are added where they are made.

Contiguous CPU tensors in float32 or bfloat16; sums are float32, and run in one order whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.memory import address
from headrace.trainer.forward.fused.fused_ops import PackedWeight, give, kernels, operands, packed_in_room, packed_now
from headrace.trainer.kernels import binding


class LowRankPair(NamedTuple):
    """The part that an adapter adds to a layer: scale · x Aᵀ Bᵀ (arXiv:2106.09685)."""

    a: Tensor
    """[r, k] float32"""
    b: Tensor
    """[n, r] float32"""
    scale: float


class LinearLayer(NamedTuple):
    """A linear layer over x [..., k]."""

    packed: PackedWeight
    weight: Tensor
    """[n, k]"""
    bias: Tensor | None
    """[n]"""
    low_rank: LowRankPair | None = None


def linears(
    x: Tensor, layers: Sequence[LinearLayer], dtype: torch.dtype, wide: Sequence[bool] | None = None
) -> tuple[Tensor, ...]:
    """x [..., k] times the transpose of each weight, plus what adapters add, plus its bias: [..., n] each, from one reading of x.
    `dtype`, bfloat16 or float32, is that of the factors and of the results; results that `wide` marks are always float32, as sums
    are. A weight's gradient is not passed to autograd: the product adds it to `.grad`.
    """
    return _apply_linears(x, None, layers, dtype, wide or [False] * len(layers))


def linear_onto(total: Tensor, x: Tensor, layer: LinearLayer, dtype: torch.dtype) -> Tensor:
    """total [..., n] float32 plus the product of factors in `dtype`, summed from `total` on as the engine does; float32."""
    return _apply_linears(x, total, [layer], dtype, [True])[0]


def _apply_linears(
    x: Tensor, onto: Tensor | None, layers: Sequence[LinearLayer], dtype: torch.dtype, wide: Sequence[bool]
) -> tuple[Tensor, ...]:
    return _Linears.apply(x, onto, dtype, wide, *flattened(layers))


def flattened(layers: Sequence[LinearLayer]) -> tuple[Any, ...]:
    """The values that an autograd function is passed for its layers: those that `Together` is made of, the tensors last."""
    packed, weights, biases, adapters = zip(*layers, strict=True)
    a, b, scales = zip(*(adapter or (None, None, 0.0) for adapter in adapters), strict=True)
    return packed, scales, *weights, *biases, *a, *b


def served_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the bias as the engine uses it: rounded to `dtype`, stored in float32."""
    return None if bias is None else bias.detach().to(dtype).float()


class Together:
    """Layers over one x [..., k] within an autograd function: their products, and the gradients.

    Adapters lie side by side, as in the engine: one thin product with all A, and each B beside zeros for the ranks of the others.
    """

    def __init__(self, packed: Sequence[PackedWeight], scales: Sequence[float], tensors: Sequence[Any]) -> None:
        """`tensors`: all weights, then all biases, A and B, with None for each that a layer lacks."""
        count = len(packed)
        self.packed, self.scales = packed, scales
        # Not saved as tensors: checkpointing would give back detached ones, and a gradient left in the `.grad` of those is lost.
        self.weights, self._biases, self._a, self._b = (tensors[count * i : count * (i + 1)] for i in range(4))
        self._ranks = sum(len(a) for a in self._a if a is not None)

    # -- forward ------------------------------------------------------------------------------------------------------------

    def outputs(self, low: Tensor, wide: Sequence[bool]) -> list[Tensor]:
        """Room for the results, [..., n] each, in the dtype of `low`, or in float32 where they are `wide`."""
        return [
            low.new_empty(*low.shape[:-1], len(weight), dtype=torch.float32 if is_wide else low.dtype)
            for weight, is_wide in zip(self.weights, wide, strict=True)
        ]

    def factors(self, low: Tensor, outputs: Sequence[Tensor]) -> tuple[Any, list[Any], Tensor | None]:
        """(the C++ structs of the products, what must live as long as they, the thin product [..., ranks], which is computed here)."""
        across = [factor for factor, _ in operands(self.packed, self.weights, low.dtype, backward=False)]
        biases = [served_bias(bias, low.dtype) for bias in self._biases]
        thin = self._thin(low) if self._ranks else None
        beside = [None] * len(across) if thin is None else [*self._beside_zeros(low.dtype)]
        table = (binding.Weight * len(outputs))(
            *(
                binding.Weight(
                    across=address(panels),
                    bias=address(bias),
                    y=address(y),
                    n=y.shape[-1],
                    wide=y.dtype == torch.float32,
                    thin=address(thin),
                    low=address(b),
                    ranks=self._ranks,
                )
                for panels, bias, b, y in zip(across, biases, beside, outputs, strict=True)
            )
        )
        return table, [across, biases, beside, thin], thin

    def _thin(self, low: Tensor) -> Tensor:
        """x Aᵀ of all adapters, rounded to the dtype of x."""
        a = torch.cat([a.detach() for a in self._a if a is not None])
        packed, thin = packed_now(a, low.dtype), low.new_empty(*low.shape[:-1], len(a))
        table = (binding.Weight * 1)(binding.Weight(across=address(packed), y=address(thin), n=len(a)))
        kernels().headrace_linear(low.dtype == torch.float32, address(low), *rows_of(low), table, 1)
        return thin

    def _beside_zeros(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Each layer's B [n, ranks of all], packed."""
        for weight, b, place in zip(self.weights, self._served_b(dtype), self._places(), strict=True):
            beside = torch.zeros(len(weight), self._ranks)
            if b is not None:
                beside[:, place] = b
            yield packed_now(beside, dtype)

    def _places(self) -> Iterator[slice]:
        """The columns of each layer among those of the thin product."""
        end = 0
        for a in self._a:
            start, end = end, end + (0 if a is None else len(a))
            yield slice(start, end)

    def _served_b(self, dtype: torch.dtype) -> Iterator[Tensor | None]:
        """Each B as the engine has it: published in `dtype`, then scaled. (It is rounded once more where it is packed.)"""
        for b, scale in zip(self._b, self.scales, strict=True):
            yield None if b is None else b.detach().to(dtype).float() * scale

    # -- backward -----------------------------------------------------------------------------------------------------------

    def backward(
        self, low: Tensor, thin: Tensor | None, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """[dx in the dtype of `low`, then gradients of biases, of A and of B]; those of the weights are added to their `.grad`.

        `needs`: whether x, each weight, each bias and so on wants one.
        """
        count = len(self.weights)
        d_y = [grad.to(low.dtype).contiguous() for grad in grads]
        trained, biased = needs[1 : 1 + count], needs[1 + count : 1 + 2 * count]
        d_thin, d_b = ([None] * count, [None] * count) if thin is None else self._through_b(thin, d_y)
        d_x = self._input_gradient(low, d_y, d_thin) if needs[0] else None
        if any(trained):
            self._weight_gradients(low, d_y, trained)
        d_bias = [d.float().flatten(0, -2).sum(0) if need else None for d, need in zip(d_y, biased, strict=True)]
        return [d_x, *d_bias, *self._a_gradients(low, d_thin), *d_b]

    def _through_b(self, thin: Tensor, d_y: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of each layer's part of the thin product, and of each B."""
        d_thin: list[Tensor | None] = []
        d_b: list[Tensor | None] = []
        parts = zip(d_y, self._served_b(thin.dtype), self._places(), self.scales, strict=True)
        for d, b, place, scale in parts:
            if b is None:
                d_thin.append(None)
                d_b.append(None)
                continue
            room, gradient = d.new_empty(*d.shape[:-1], b.shape[1]), torch.empty(b.shape)
            d_thin.append(input_gradient(room, [(d, packed_now(b, d.dtype, down=True))]))
            weight_gradient(thin[..., place].contiguous(), [d], [gradient], [False])
            d_b.append(gradient.mul_(scale))
        return d_thin, d_b

    def _a_gradients(self, low: Tensor, d_thin: Sequence[Tensor | None]) -> list[Tensor | None]:
        gradients = [None if a is None else torch.empty(a.shape) for a in self._a]
        pairs = [(d, gradient) for d, gradient in zip(d_thin, gradients, strict=True) if d is not None]
        if pairs:
            weight_gradient(low, [d for d, _ in pairs], [into for _, into in pairs], [False] * len(pairs))
        return gradients

    def _input_gradient(self, low: Tensor, d_y: Sequence[Tensor], d_thin: Sequence[Tensor | None]) -> Tensor:
        down = operands(self.packed, self.weights, low.dtype, backward=True)
        pairs: list[tuple[Tensor, Tensor | None]] = [(d, panels) for d, (_, panels) in zip(d_y, down, strict=True)]
        for a, d in zip(self._a, d_thin, strict=True):
            if d is not None:
                pairs.append((d, packed_now(a, low.dtype, down=True)))
        return input_gradient(torch.empty_like(low), pairs)

    def _weight_gradients(self, low: Tensor, d_y: Sequence[Tensor], trained: Sequence[bool]) -> None:
        into = [
            packed.gradient(weight) if train else (None, False)
            for packed, weight, train in zip(self.packed, self.weights, trained, strict=True)
        ]
        weight_gradient(low, d_y, [gradient for gradient, _ in into], [add for _, add in into])
        for weight, (gradient, add) in zip(self.weights, into, strict=True):
            if gradient is not None and not add:
                give(weight, gradient)


def rows_of(x: Tensor) -> tuple[int, int]:
    """The shape of x [..., k] as a matrix."""
    return x.numel() // x.shape[-1], x.shape[-1]


def input_gradient(d_x: Tensor, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """d_x [..., k] becomes the sum over all pairs of dy [..., n] times a weight packed `down`."""
    table = (binding.Weight * len(pairs))(
        *(binding.Weight(down=address(down), y=address(d), n=d.shape[-1]) for d, down in pairs)
    )
    kernels().headrace_linear_input_gradient(d_x.dtype == torch.float32, address(d_x), *rows_of(d_x), table, len(pairs))
    return d_x


def weight_gradient(low: Tensor, d_y: Sequence[Tensor], into: Sequence[Tensor | None], add: Sequence[bool]) -> None:
    """Each of `into` [n, k] becomes dyᵀ x, or has it added; None for a weight without a gradient."""
    table = (binding.Weight * len(d_y))(
        *(
            binding.Weight(y=address(d), gradient=address(gradient), n=d.shape[-1], add=more)
            for d, gradient, more in zip(d_y, into, add, strict=True)
        )
    )
    kernels().headrace_linear_weight_gradient(low.dtype == torch.float32, address(low), *rows_of(low), table, len(d_y))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        onto: Tensor | None,
        dtype: torch.dtype,
        wide: Sequence[bool],
        packed: Sequence[PackedWeight],
        scales: Sequence[float],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        together = Together(packed, scales, tensors)
        low = x.to(dtype).contiguous()
        outputs = together.outputs(low, wide)
        table, held, thin = together.factors(low, outputs)
        onto = None if onto is None else onto.contiguous()
        for row in table:
            row.onto = address(onto)
        kernels().headrace_linear(dtype == torch.float32, address(low), *rows_of(low), table, len(table))
        del held
        ctx.together, ctx.dtype, ctx.onto = together, x.dtype, onto is not None
        ctx.save_for_backward(low, thin)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[6:])
        d_x, *others = ctx.together.backward(*ctx.saved_tensors, grads, needs)
        d_x = None if d_x is None else d_x.to(ctx.dtype)
        weights = [None] * len(ctx.together.weights)
        return d_x, grads[0] if ctx.onto else None, None, None, None, None, *weights, *others


# --- Autograd functions whose forward pass is the engine's
# Autograd functions whose forward pass is the engine's, with its order of sums and its roundings; see `kernels/src/served.h`.


def gated_linear(x: Tensor, gate: LinearLayer, up: LinearLayer, gelu: bool) -> Tensor:
    """act(x Gᵀ) · (x Uᵀ) in bfloat16, of products that nothing has rounded before."""
    return _GatedLinear.apply(x, gelu, *flattened([gate, up]))


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gelu: bool, packed: Sequence[PackedWeight], scales: Sequence[float], *tensors: Any
    ) -> Tensor:
        together = Together(packed, scales, tensors)
        low = x.to(torch.bfloat16).contiguous()
        gate, up = together.outputs(low, [False, False])
        y = torch.empty_like(gate)
        table, held, thin = together.factors(low, [gate, up])
        kernels().headrace_linear_gated(address(low), *rows_of(low), *table, address(y), gelu)
        del held
        ctx.together, ctx.gelu, ctx.dtype = together, gelu, x.dtype
        ctx.save_for_backward(low, thin, gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        low, thin, gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        d_y = d_y.contiguous()  # see `fused_ops._Norm.backward`
        given = map(address, (gate, up, d_y, d_gate, d_up))
        kernels().headrace_gated_backward(False, *given, gate.numel(), ctx.gelu)
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        d_x, *others = ctx.together.backward(low, thin, (d_gate, d_up), needs)
        return None if d_x is None else d_x.to(ctx.dtype), None, None, None, None, None, *others


class Asked(NamedTuple):
    """The log-probs that are wanted of each row: ids[offsets[u]:offsets[u + 1]] of row u."""

    offsets: Tensor
    """[U + 1] int64"""
    ids: Tensor
    """[P] int64"""
    targets: Tensor | None = None
    """[U + 1] int64: the first ids of row u are its targets[u]:targets[u + 1], and then follow those that were kept for each of these."""
    counts: Tensor | None = None
    """[M] int64: how many were kept for each target; 0 if nothing was cut."""
    set_of: Tensor | None = None
    """[M] int64: the set that was left for each target, -1 for none."""
    sets: Tensor | None = None
    """[D, W] uint8: these sets as bits, the lowest of a byte first."""


class FoundLogprobs(NamedTuple):
    """All float32."""

    values: Tensor
    """[P] the log-probs asked for."""
    among: Tensor | None
    """[M] log-probs of the targets among what was kept for them; anything for those from which nothing was cut."""
    logsumexp: Tensor
    """[U] of each row's logits over the temperature."""
    entropy: Tensor
    """[U] in nats."""


def log_probabilities(
    hidden: Tensor, packed: PackedWeight, weight: Tensor, temperature: float, asked: Asked
) -> FoundLogprobs:
    """hidden [U, H] bfloat16 or float32, head [V, H]. Logits are float32 and lie in cache."""
    among = None if asked.counts is None else torch.empty(len(asked.counts))
    found = FoundLogprobs(torch.empty(len(asked.ids)), among, *torch.empty(2, len(hidden)).unbind())
    across = packed.packed(weight, backward=False)[0] if hidden.dtype == torch.bfloat16 else packed_in_room(weight)
    width = 0 if asked.sets is None else asked.sets.shape[1]
    given = (address(across), len(weight), 1 / temperature, *map(address, asked), width, *map(address, found))
    kernels().headrace_log_probabilities(hidden.dtype == torch.float32, address(hidden), *hidden.shape, *given)
    return found
