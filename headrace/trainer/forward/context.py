"""The tokens of a microbatch, spread over several ranks that compute it together (context parallelism).

Token i of a pack lies on rank i mod n, so that every rank has as many tokens of a prompt, and of each completion, as any other. Only
attention mixes tokens, and it is computed by one of two ways:

    heads    where n divides the query heads: every rank gets all tokens of its part of the heads, attends to the whole tree, and gives
             each rank back its own tokens (two all-to-alls; Ulysses, arXiv 2309.14509). Key heads that n does not divide are repeated
    tokens   otherwise: keys and values of all tokens are gathered, and every rank keeps its own queries (one all-gather)

Both attend to the same tree as one rank does. Log-probs are brought together afterwards, so that every rank of a context has those of the
whole microbatch, and computes the whole loss; its backward pass begins at the log-probs of its own tokens only. So gradients are summed
over the ranks of a context as over all others (C9), and numbers that a loss makes of them are counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from headrace.trainer.packing import ROOT, Pack, Segment
from headrace.trainer.parallel import repeats


@dataclass(frozen=True)
class Context:
    """The ranks that compute each microbatch together, and the place of this one among them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device

    def part(self, tokens: Tensor, fill: int = 0) -> Tensor:
        """[N, ...] -> [n, ...]: the values of this rank's tokens. n is the same on all ranks, so that `fill` may follow N."""
        missing = -len(tokens) % self.size
        padded = pad(tokens, (*(0, 0) * (tokens.ndim - 1), 0, missing), value=fill) if missing else tokens
        return padded[self.rank :: self.size]

    def segments(self, pack: Pack) -> tuple[Segment, ...]:
        """The segments of all tokens. Those that fill up are a tree of their own."""
        count = len(pack.tokens)
        missing = -count % self.size
        return pack.segments + ((Segment(count, missing, ROOT),) if missing else ())

    def places(self, predictor: Tensor) -> Tensor:
        """[M] places in the pack -> which of them lie on this rank."""
        return (predictor % self.size == self.rank).nonzero()[:, 0]

    def collected(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """[..., m] values of this rank's loss tokens -> [..., M] of all. The gradient is that of this rank's own values alone."""
        found: Tensor = _Collect.apply(values, places, count, self.group)
        return found

    def divides(self, heads: int) -> bool:
        """Whether attention goes by heads."""
        return heads % self.size == 0

    def added(self, number: int) -> int:
        """The sum over the ranks."""
        total = torch.tensor(number, device=self.device)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """[1, H, n, D] of the own tokens, thrice -> [1, H / size, N, D] of all tokens. Sent in the dtype of `value`."""
        key, value = (_repeated(x, query.shape[1], self.size) for x in (key, value))
        parts = [x[0].unflatten(0, (self.size, -1)).transpose(1, 2) for x in (query, key, value)]  # [size, n, h, D]
        sent = torch.cat([x.flatten(2).to(value.dtype) for x in parts], 2)
        return _heads(self._in_order(_Exchange.apply(sent, self.group)), parts)

    def to_tokens(self, attended: Tensor) -> Tensor:
        """[1, N, H / size, D] of all tokens -> [1, n, H, D] of the own ones. The inverse of `to_heads`."""
        sent = attended[0].unflatten(0, (-1, self.size)).transpose(0, 1)
        found: Tensor = _Exchange.apply(sent, self.group)
        return found.transpose(0, 1).flatten(1, 2)[None]

    def gathered(self, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """[1, H_kv, n, D] of the own tokens, twice -> [1, H_kv, N, D] of all tokens. Sent in the dtype of `value`."""
        parts = [x.transpose(1, 2) for x in (key, value)]
        sent = torch.cat([x[0].flatten(1).to(value.dtype) for x in parts], 1)
        return _heads(self._in_order(_Gather.apply(sent, self.group).unflatten(0, (self.size, -1))), parts)

    def _in_order(self, by_rank: Tensor) -> Tensor:
        """[size, n, W] by rank -> [N, W] in the order of the pack."""
        return by_rank.transpose(0, 1).flatten(0, 1)


def _repeated(x: Tensor, heads: int, size: int) -> Tensor:
    """The key heads, each as many times as it takes for `size` to divide them. All of them still serve as many query heads."""
    times = repeats(heads, x.shape[1], size)
    return x if times == 1 else x.repeat_interleave(times, 1)


def _heads(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """[N, all heads · D] -> [1, h, N, D] for each of `like` [..., h, D]."""
    pieces = flat.split([x.shape[-2] * x.shape[-1] for x in like], 1)
    return [piece.unflatten(1, x.shape[-2:]).transpose(0, 1)[None] for piece, x in zip(pieces, like, strict=True)]


class _Exchange(torch.autograd.Function):
    """[size, ...] -> the same shape: part r goes to rank r, and part r of the result has come from it."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = (
        sent.contiguous()
    )  # a result like a transposed tensor would have its strides, and torch would write nonsense into it
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


class _Gather(torch.autograd.Function):
    """[n, W] -> [size · n, W], by rank. Gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows, ctx.dtype = group, len(own), own.dtype
        found = own.new_empty(dist.get_world_size(group) * len(own), own.shape[1])
        dist.all_gather_into_tensor(found, own.contiguous(), group=group)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exact = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        own = exact.new_empty(ctx.rows, exact.shape[1])
        dist.reduce_scatter_tensor(own, exact, group=ctx.group)
        return own.to(ctx.dtype), None


class _Collect(torch.autograd.Function):
    """[..., m] -> [..., count], of which every rank has other places. They are added to zeros, which is exact."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        found = values.new_zeros(*values.shape[:-1], count)
        found[..., places] = values
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[..., places], None, None, None
