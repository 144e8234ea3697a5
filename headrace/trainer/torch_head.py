"""Log-probs of given tokens, and entropies, from hidden states, without ever holding the logits [M, V].

The vocabulary is walked in blocks. (Blocks of tokens would do too, but each of them adds to the whole gradient of the head
matrix; a block of the vocabulary writes its own rows of it once.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.packing import Kept

BLOCK_ELEMENTS = 1 << 22
"""Logits held at once: 16 MiB in float32, so that they stay in a CPU's cache."""


class Head(NamedTuple):
    logprob: Tensor
    """[M] float32, with gradient"""
    entropy: Tensor
    """[M] float32, in nats, of the whole vocabulary; without gradient"""
    outside: int
    """Targets that lie outside their kept set: their log-prob is that of the whole vocabulary."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    predictor: Tensor,
    target: Tensor,
    temperature: float,
    dtype: torch.dtype,
    kept: Kept | None = None,
    softcap: float = 0.0,
) -> Head:
    """log p(target) at `temperature`, and entropies.

    hidden [N, H], weight [V, H], bias [V], predictor [M] places in hidden, target [M]. The products are computed in `dtype`,
    softmax and sums in float32. A place that predicts several targets (the end of a shared prompt) is computed once.
    """
    places, which = torch.unique(predictor, return_inverse=True)
    if bias is None:
        bias = weight.new_zeros(0)
    logprob, entropy = _TokenLogprobs.apply(
        hidden.index_select(0, places), weight, bias, which, target, temperature, dtype
    )
    return Head(logprob, entropy, 0)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor, block: slice, temperature: float) -> Tensor:
    """[U, block] float32."""
    logits = torch.nn.functional.linear(hidden, weight[block]).float()
    if len(bias):
        logits += bias[block]
    return logits if temperature == 1 else logits.div_(temperature)


def _blocks(places: int, vocabulary: int) -> Iterator[slice]:
    size = max(BLOCK_ELEMENTS // places, 256)
    return (slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size))


def _inside(target: Tensor, block: slice) -> Tensor:
    """Which of the M targets lie in a block of the vocabulary."""
    return ((target >= block.start) & (target < block.stop)).nonzero()[:, 0]


class _TokenLogprobs(torch.autograd.Function):
    """hidden [U, H], which [M] in 0..U-1. The backward pass computes the logits of each block again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        which: Tensor,
        target: Tensor,
        temperature: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        low_hidden, low_weight = hidden.to(dtype), weight.to(dtype)
        chosen = torch.empty(len(target), dtype=torch.float32, device=hidden.device)
        # Running maximum, sum of exp(l - maximum), and that sum weighted by l: softmax online (arXiv 1805.02867).
        top = torch.full((len(hidden), 1), -torch.inf, device=hidden.device)
        mass, moment = torch.zeros_like(top), torch.zeros_like(top)
        for block in _blocks(len(hidden), len(weight)):
            logits = _logits(low_hidden, low_weight, bias, block, temperature)
            here = _inside(target, block)
            chosen[here] = logits[which[here], target[here] - block.start]
            higher = torch.maximum(top, logits.amax(1, keepdim=True))
            shrink, top = torch.exp(top - higher), higher
            probs = torch.exp(logits - top)
            mass = mass * shrink + probs.sum(1, keepdim=True)
            moment = moment * shrink + probs.mul_(logits).sum(1, keepdim=True)
        logsumexp = (top + mass.log())[:, 0]
        entropy = (logsumexp - (moment / mass)[:, 0])[which]
        ctx.save_for_backward(low_hidden, low_weight, bias, which, target, logsumexp)
        ctx.temperature, ctx.dtypes = temperature, (hidden.dtype, weight.dtype)
        ctx.mark_non_differentiable(entropy)
        return chosen - logsumexp[which], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, which, target, logsumexp = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = torch.empty_like(weight, dtype=weight_dtype)
        d_bias = torch.empty_like(bias)
        grad = grad / ctx.temperature
        total = torch.zeros_like(logsumexp).index_add_(0, which, grad)[:, None]
        for block in _blocks(len(hidden), len(weight)):
            d_logits = _logits(hidden, weight, bias, block, ctx.temperature)
            d_logits.sub_(logsumexp[:, None]).exp_().mul_(-total)
            here = _inside(target, block)
            d_logits.index_put_((which[here], target[here] - block.start), grad[here], accumulate=True)
            if len(bias):
                d_bias[block] = d_logits.sum(0)
            low = d_logits.to(hidden.dtype)
            d_hidden += low @ weight[block]
            d_weight[block] = low.t() @ hidden
        return d_hidden.to(hidden_dtype), d_weight, d_bias, None, None, None, None
