"""Log-probs of given tokens, and entropies, from hidden states, without ever holding the logits [M, V].

The vocabulary is walked in blocks. (Blocks of tokens would do too, but each of them adds to the whole gradient of the head
matrix; a block of the vocabulary writes its own rows of it once.)

What is wanted of the logits is few numbers: the log-probs of certain (place, id) pairs - the targets, and the ids that the
sampler kept. Everything else is made of these by plain operations on short vectors. A set that a constraint left may be nearly the whole
vocabulary: a place that has one is walked once more, as a place of its own behind the others whose other logits are ruled out.

A vocabulary may be split over ranks, each of which holds some rows of the head's matrix (arXiv 1909.08053): every rank walks its
own rows, and they exchange a few numbers per place instead of the matrix.

With the trainer's kernels, and on CUDA, logits are float32. PyTorch's products of bfloat16 on a CPU give bfloat16, which knows a logit of 20 to 1/16: that was
most of the difference between the trainer's log-probs and the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.cuda_ops import wide_logits
from headrace.trainer.forward.fused.fused_ops import PackedWeight, valued
from headrace.trainer.forward.fused.fused_products import Asked, FoundLogprobs, log_probabilities
from headrace.trainer.packing import Kept

BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Logits held at once: 4 MiB in float32, so that they stay in a CPU's cache (measured: 250 to 3,000 places, bf16); 512 MiB on a GPU, where
small blocks are all launches (a step of 66,304 tokens on an H100: 2.7 s, and 1.3 with these)."""


class Head(NamedTuple):
    logprob: Tensor
    """[M] float32, with gradient"""
    entropy: Tensor
    """[M] float32, in nats, of the whole vocabulary; with gradient, which costs nothing where it is not used"""
    outside: int
    """Targets that lie outside their kept set: their log-prob is that of the whole vocabulary."""
    value: Tensor | None = None
    """[M] the critic's, with gradient (`forward.py` fills it in)"""


class Scale(NamedTuple):
    """The scaling of the product of hidden states and head, before softmax."""

    temperature: float = 1.0
    softcap: float = 0.0
    """cap · tanh(logit / cap) (Gemma 2, arXiv 2408.00118), before the temperature; 0 is none."""

    def of(self, logits: Tensor) -> Tensor:
        """Scales logits in place and returns them."""
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def slope(self, scaled: Tensor) -> Tensor | float:
        """The derivative of `of`, from its result."""
        if not self.softcap:
            return 1 / self.temperature
        return (1 - (scaled * (self.temperature / self.softcap)).square_()).div_(self.temperature)


RULED_OUT = -1e30
"""The logit of an id outside a set: it adds nothing to a sum, and unlike -inf it makes no NaN where a block has none of the set."""


class Restricted(NamedTuple):
    """Places among a set: place U + i of a head is place `place[i]` of its U, with the logits outside its set ruled out."""

    place: Tensor
    """[S] in 0..U-1"""
    target: Tensor
    """[S] which of the M targets it is for, ascending"""
    bits: Tensor
    """[D, W] uint8, as in `Kept.sets`"""
    which: Tensor
    """[S] the set of each"""

    def has(self, ids: Tensor) -> Tensor:
        """[S] whether an id each is in the sets."""
        byte = (ids >> 3).clamp(max=self.bits.shape[1] - 1)
        return (ids < 8 * self.bits.shape[1]) & ((self.bits[self.which, byte] >> (ids & 7)) & 1 > 0)

    def beside(self, logits: Tensor, start: int) -> Tensor:
        """[U + S, block] the logits [U, block] of the ids from `start` on, and those among the sets."""
        stop, first = start + logits.shape[1], start // 8
        some = self.bits[:, first : -(-stop // 8)]
        flags = (some[:, :, None] >> torch.arange(8, device=some.device, dtype=torch.uint8)) & 1
        inside = logits.new_zeros(len(some), logits.shape[1], dtype=torch.bool)
        found = flags.flatten(1)[:, start - 8 * first :][:, : logits.shape[1]]
        inside[:, : found.shape[1]] = found.bool()
        return torch.cat([logits, logits[self.place].masked_fill_(~inside[self.which], RULED_OUT)])

    def folded(self, gradient: Tensor) -> Tensor:
        """[U, block] the gradient of the logits, from that of what `beside` returned."""
        own = gradient[: len(gradient) - len(self.place)]
        # index_put rather than index_add: on CUDA its sums have an order (C8)
        return own.index_put_((self.place,), gradient[len(own) :], accumulate=True)


class OwnRows(NamedTuple):
    """The rows of the head's matrix that this rank holds, of those that a group of ranks holds together. All of them have the same places
    and targets."""

    start: int
    group: dist.ProcessGroup

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    predictor: Tensor,
    target: Tensor,
    *,
    temperature: float,
    dtype: torch.dtype,
    kept: Kept | None = None,
    softcap: float = 0.0,
    packed: PackedWeight | None = None,
    backend: str = "",
) -> Head:
    """log p(target) of the distribution that the sampler drew from, and entropies.

    hidden [N, H], weight [V, H], bias [V], predictor [M] places in hidden, target [M], kept [M]. The products are computed in
    `dtype`, softmax and sums in float32; by the kernels where `packed` is given (a head without a bias). A place that predicts
    several targets (the end of a shared prompt) is computed once. Weight and bias may be split over ranks (DTensors). `backend`: of
    torch.compile, which makes one kernel of what is done to a block of logits; empty: they are operations of their own.
    """
    weight, bias, share = held(weight, bias)
    places, which = torch.unique(predictor, return_inverse=True)
    if bias is None:
        bias = weight.new_zeros(0)
    among_sets = _restricted(which, kept)
    place, ids = (which, target) if kept is None else _pairs(which, target, kept)
    if among_sets is not None:
        behind = torch.arange(len(places), len(places) + len(among_sets.place), device=place.device)
        place, ids = torch.cat([place, behind]), torch.cat([ids, target[among_sets.target]])
    scale = Scale(temperature, softcap)
    counts = None if kept is None else kept.offsets.diff()
    how = _How(scale, dtype, None if softcap else packed, share=share, counts=counts, sets=among_sets, backend=backend)
    values, entropy, among = _LogProbs.apply(hidden.index_select(0, places), weight, bias, place, ids, how)
    return _compose(values, entropy[which], target=target, kept=kept, among_sets=among_sets, among=among)


def held(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, OwnRows | None]:
    """Returns what this rank computes with: its rows where the vocabulary is split, equally many on each rank; otherwise the whole,
    gathered if need be. The gradient returns in the same parts."""
    split: Any = weight
    if not hasattr(split, "to_local"):  # a DTensor, whose module is imported only where there are ranks
        return weight, bias, None
    if split.placements[0].is_shard(0):
        rows, mesh = split.to_local(), split.device_mesh
        share = OwnRows(mesh.get_local_rank() * len(rows), mesh.get_group())
        return rows, None if bias is None else cast(Any, bias).to_local(), share
    return _whole(split), None if bias is None else _whole(bias), None


def _whole(tensor: Any) -> Tensor:
    """The whole of a tensor of which every rank computes the whole gradient."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.full_tensor(grad_placements=[Replicate()])


def dense_logprobs(logits: Tensor, predictor: Tensor, target: Tensor, kept: Kept | None, temperature: float) -> Head:
    """Returns the head's numbers from logits [N, V] that a model has already made (and capped)."""
    logits = logits.index_select(0, predictor).float() / temperature
    which = torch.arange(len(target), device=target.device)
    place, ids = (which, target) if kept is None else _pairs(which, target, kept)
    log_p = logits.log_softmax(-1)
    entropy = _Entropy.apply(log_p)
    values, among_sets = log_p[place, ids], _restricted(which, kept)
    if among_sets is not None:
        own = among_sets.beside(logits, 0)[len(logits) :].log_softmax(-1)
        values = torch.cat([values, own.gather(1, target[among_sets.target, None])[:, 0]])
    return _compose(values, entropy, target=target, kept=kept, among_sets=among_sets)


def _restricted(which: Tensor, kept: Kept | None) -> Restricted | None:
    """`which` [M]: the place of each target."""
    if kept is None or kept.sets is None or kept.set_of is None:
        return None
    own = (kept.set_of >= 0).nonzero()[:, 0]
    return Restricted(which[own], own, kept.sets, kept.set_of[own]) if len(own) else None


def _pairs(which: Tensor, target: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
    """(place, id) of the targets, then of the ids that were kept."""
    return torch.cat([which, which[_rows(kept)]]), torch.cat([target, kept.ids])


def _rows(kept: Kept) -> Tensor:
    """[nnz] int64: whose id it is."""
    return torch.repeat_interleave(kept.offsets.diff(), output_size=len(kept.ids))


def _compose(
    values: Tensor,
    entropy: Tensor,
    *,
    target: Tensor,
    kept: Kept | None,
    among_sets: Restricted | None,
    among: Tensor | None = None,
) -> Head:
    """values: log-probs of the targets [M], then of the ids that were kept [nnz], then of targets among their sets [S]; entropy [M].
    `among` [M]: the log-probs of the targets among what was kept for them, if they are known more exactly than from these values."""
    if kept is None:
        return Head(values, entropy, 0)
    chosen, cut, in_sets = values.split([len(target), len(kept.ids), len(values) - len(target) - len(kept.ids)])
    rows = _rows(kept)
    inside = torch.zeros_like(target).index_add_(0, rows, (kept.ids == target[rows]).long()) > 0
    outside = int(((kept.offsets.diff() > 0) & ~inside).sum())
    top = torch.zeros_like(chosen).scatter_reduce_(0, rows, cut.detach(), "amax", include_self=False)
    # index_put rather than index_add: on CUDA its sums have an order (C8)
    mass = torch.zeros_like(chosen).index_put((rows,), (cut - top[rows]).exp(), accumulate=True)
    restricted = top + torch.where(inside, mass, 1.0).log()
    logprob = chosen - torch.where(inside, restricted, 0.0)
    if among_sets is not None:
        own = among_sets.target
        allowed = among_sets.has(target[own])
        inside = inside.index_copy(0, own, allowed)
        outside += int((~allowed).sum())
        logprob = logprob.index_copy(0, own, torch.where(allowed, in_sets, chosen[own]))
    if among is not None:
        logprob = valued(logprob, torch.where(inside, among, chosen.detach()))
    return Head(logprob, entropy, outside)


class _Entropy(torch.autograd.Function):
    """Log-probs [M, V] -> entropy [M]. It keeps nothing but the log-probs, which the log-softmax keeps as well."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor) -> Tensor:
        ctx.save_for_backward(log_p)
        finite = log_p.clamp(min=-1e30)  # 0 · -inf is NaN
        return -(finite.exp() * finite).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_p,) = ctx.saved_tensors
        return -log_p.exp() * (log_p.clamp(min=-1e30) + 1) * grad[:, None]


class _Pairs(NamedTuple):
    place: Tensor
    """[P] in 0..U-1, and U..U+S-1 for places among sets"""
    ids: Tensor
    """[P]"""


class _How(NamedTuple):
    scale: Scale
    dtype: torch.dtype
    packed: PackedWeight | None
    share: OwnRows | None = None
    counts: Tensor | None = None
    """[M] how many ids were kept for each target. Targets are the first of the pairs, and what was kept follows in their order."""
    sets: Restricted | None = None
    """Places among sets. Their pairs are the last ones, in their order."""
    backend: str = ""


class _LogProbs(torch.autograd.Function):
    """hidden [U, H], place [P], ids [P] -> log-probs of these pairs [P], entropy [U], and by kernels those of targets among what was kept
    for them [M], else None (no gradient).

    The backward pass computes the logits of each block again. The gradient of an entropy H by a logit of log-prob l is -exp(l)·(l + H): one
    more pass over the block, where an entropy is used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        place: Tensor,
        ids: Tensor,
        how: _How,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        low_hidden, low_weight = hidden.to(how.dtype), weight.to(how.dtype)
        among = None
        if how.packed is None:
            found, logsumexp, entropy = _by_blocks(low_hidden, low_weight, bias, _Pairs(place, ids), how)
        else:  # the weight itself: a copy may lie where the last one lay, and be taken for it
            found, among, logsumexp, entropy = _by_kernels(low_hidden, weight, _Pairs(place, ids), how)
        order = ids.argsort(stable=True)
        ctx.save_for_backward(low_hidden, low_weight, bias, order, place[order], ids[order], logsumexp, entropy)
        ctx.scale, ctx.share, ctx.sets, ctx.dtypes = how.scale, how.share, how.sets, (hidden.dtype, weight.dtype)
        ctx.backend = how.backend
        ctx.set_materialize_grads(False)
        if among is not None:
            ctx.mark_non_differentiable(among)
        return found, entropy, among

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_values: Tensor | None, grad_entropy: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, order, place, ids, logsumexp, entropy = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        wants_weight = ctx.needs_input_grad[1]  # not where the head is frozen
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = torch.empty_like(weight, dtype=weight_dtype) if wants_weight else None
        d_bias = torch.empty_like(bias)
        grad_values = logsumexp.new_zeros(len(order)) if grad_values is None else grad_values[order]
        # index_put rather than index_add: on CUDA its sums have an order (C8)
        grad_total = torch.zeros_like(logsumexp).index_put_((place,), -grad_values, accumulate=True)
        own, ids = _own(ids, len(weight), ctx.share)
        place, grad_values = place[own], grad_values[own]
        for block, mine in _blocks(len(hidden), len(weight), ids):
            d_logits = _block_logits(hidden, weight, bias, block, ctx.scale)
            slope = ctx.scale.slope(d_logits)
            if ctx.sets is not None:
                d_logits = ctx.sets.beside(d_logits, _first_id(block, ctx.share))
            if grad_entropy is None:
                d_logits = _fused(_pushed, ctx.backend)(d_logits, logsumexp, grad_total)
            else:
                slopes = _entropy_slopes(grad_total, grad_entropy, entropy)
                d_logits = _fused(_pushed_with_entropy, ctx.backend)(d_logits, logsumexp, *slopes)
            d_logits.index_put_((place[mine], ids[mine] - block.start), grad_values[mine], accumulate=True)
            if ctx.sets is not None:
                d_logits = ctx.sets.folded(d_logits)
            if isinstance(slope, Tensor) or slope != 1:
                d_logits.mul_(slope)
            if len(bias):
                d_bias[block] = d_logits.sum(0)
            low = d_logits.to(hidden.dtype)
            d_hidden += low @ weight[block]
            if d_weight is not None:
                d_weight[block] = low.t() @ hidden
        if ctx.share:
            ctx.share.sum(d_hidden)
        return d_hidden.to(hidden_dtype), d_weight, d_bias, None, None, None


def _entropy_slopes(grad_total: Tensor, grad_entropy: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Twice [U + S]: what probabilities are multiplied by is the first minus the second times the log-prob. Places among sets have no entropy of
    their own."""
    slope = torch.zeros_like(grad_total)
    slope[: len(entropy)] = grad_entropy
    offset = grad_total.clone()
    offset[: len(entropy)] -= grad_entropy * entropy
    return offset, slope


# -- what is done to a block of logits, each one kernel where it is compiled


def _folded(logits: Tensor, top: Tensor, mass: Tensor, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The running sums [U, 1] of a softmax with those of one more block."""
    higher = torch.maximum(top, logits.amax(1, keepdim=True))
    shrink = torch.exp(top - higher)
    probs = torch.exp(logits - higher)
    mass = mass * shrink + probs.sum(1, keepdim=True)
    return higher, mass, moment * shrink + probs.mul_(logits).sum(1, keepdim=True)


def _pushed(logits: Tensor, logsumexp: Tensor, factor: Tensor) -> Tensor:
    """[U, block] probabilities times a factor [U] of their place. Takes the memory of the logits."""
    return logits.sub_(logsumexp[:, None]).exp_().mul_(factor[:, None])


def _pushed_with_entropy(logits: Tensor, logsumexp: Tensor, offset: Tensor, slope: Tensor) -> Tensor:
    """[U, block] probabilities times a factor that follows from their log-prob: offset [U] - slope [U] × log-prob. Takes the memory of the logits."""
    logits.sub_(logsumexp[:, None])
    factor = torch.addcmul(offset[:, None], logits, slope[:, None], value=-1)
    return logits.exp_().mul_(factor)


@cache
def _fused(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, backend=backend) if backend else function


def _by_kernels(hidden: Tensor, weight: Tensor, pairs: _Pairs, how: _How) -> FoundLogprobs:
    """Computes the same as `_by_blocks`, without a bias and with logits in float32; and log-probs among what was kept."""
    assert how.packed is not None
    real = len(pairs.place) - (len(how.sets.place) if how.sets else 0)
    place, ids = pairs.place[:real], pairs.ids[:real]
    order, offsets = _by_place(place, len(hidden))
    asked, first = Asked(offsets, ids[order]), None
    if how.counts is not None:
        first, targets = _by_place(place[: len(how.counts)], len(hidden))
        asked = asked._replace(targets=targets, counts=how.counts[first])
    if how.sets is not None and first is not None:
        set_of = torch.full((len(first),), -1).index_copy_(0, how.sets.target, how.sets.which)
        asked = asked._replace(set_of=set_of[first], sets=how.sets.bits.contiguous())
    found = log_probabilities(hidden, how.packed, weight, how.scale.temperature, asked)
    among = found.among
    if first is not None and among is not None:
        among = torch.empty_like(among).index_copy_(0, first, among)
    found = found._replace(values=torch.empty_like(found.values).index_copy_(0, order, found.values), among=among)
    return found if how.sets is None else _with_sets(found, how.sets)


def _with_sets(found: FoundLogprobs, sets: Restricted) -> FoundLogprobs:
    """Appends the places among sets, whose log-sum-exp is known by the difference of the two log-probs of their targets."""
    assert found.among is not None
    own = found.among[sets.target]
    logsumexp = found.logsumexp[sets.place] + found.values[sets.target] - own
    return found._replace(values=torch.cat([found.values, own]), logsumexp=torch.cat([found.logsumexp, logsumexp]))


def _by_place(place: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """([P] the order by place, in which those of one place keep theirs; [places + 1] the first of each)."""
    order = place.argsort(stable=True)
    return order, torch.searchsorted(place[order], torch.arange(places + 1))


def _by_blocks(hidden: Tensor, weight: Tensor, bias: Tensor, pairs: _Pairs, how: _How) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the pairs, log-sum-exp of each place, those among sets included, and entropy of the others."""
    order = pairs.ids.argsort(stable=True)
    own, ids = _own(pairs.ids[order], len(weight), how.share)
    order = order[own]
    place = pairs.place[order]
    found = torch.empty(len(ids), dtype=torch.float32, device=hidden.device)
    # Running maximum, sum of exp(l - maximum), and that sum weighted by l: softmax online (arXiv 1805.02867).
    places = len(hidden) + (len(how.sets.place) if how.sets else 0)
    top = torch.full((places, 1), -torch.inf, device=hidden.device)
    mass, moment = torch.zeros_like(top), torch.zeros_like(top)
    for block, mine in _blocks(len(hidden), len(weight), ids):
        logits = _block_logits(hidden, weight, bias, block, how.scale)
        if how.sets is not None:
            logits = how.sets.beside(logits, _first_id(block, how.share))
        found[mine] = logits[place[mine], ids[mine] - block.start]
        top, mass, moment = _fused(_folded, how.backend)(logits, top, mass, moment)
    chosen = found.new_zeros(len(pairs.ids)).index_copy_(0, order, found)
    if how.share:
        top, mass, moment, chosen = _of_all(how.share, top, mass, moment, chosen)
    logsumexp = (top + mass.log())[:, 0]
    entropy = (logsumexp - (moment / mass)[:, 0])[: len(hidden)]
    return chosen - logsumexp[pairs.place], logsumexp, entropy


def _first_id(block: slice, share: OwnRows | None) -> int:
    """The id of the first row of a block of this rank's."""
    return block.start + (share.start if share else 0)


def _own(ids: Tensor, rows: int, share: OwnRows | None) -> tuple[slice, Tensor]:
    """Which of the ascending ids lie in the rows of this rank, and these ids as numbers of its rows."""
    if share is None:
        return slice(None), ids
    edges = torch.tensor([share.start, share.start + rows], device=ids.device)
    own = slice(*torch.searchsorted(ids, edges).tolist())
    return own, ids[own] - share.start


def _of_all(share: OwnRows, top: Tensor, mass: Tensor, moment: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    """The numbers of the whole vocabulary: each place's maximum and sums [U, 1], and the logits [P] that one rank each has found."""
    highest = top.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=share.group)
    shrink = torch.exp(top - highest)
    sums = share.sum(torch.cat([(mass * shrink)[:, 0], (moment * shrink)[:, 0], chosen]))
    mass, moment, chosen = sums.split([len(top), len(top), len(chosen)])
    return highest, mass[:, None], moment[:, None], chosen


def _block_logits(hidden: Tensor, weight: Tensor, bias: Tensor, block: slice, scale: Scale) -> Tensor:
    """[U, block] float32."""
    logits = wide_logits(hidden, weight[block])
    if len(bias):
        logits += bias[block]
    return scale.of(logits)


def _blocks(places: int, vocabulary: int, ids: Tensor) -> list[tuple[slice, slice]]:
    """Blocks of the vocabulary, and which of the ascending ids lie in each."""
    size = size_of_blocks(places, ids.device)
    edges = [*range(0, vocabulary, size), vocabulary]
    found = torch.searchsorted(ids, torch.tensor(edges, device=ids.device)).tolist()
    return [(slice(*block), slice(*mine)) for block, mine in zip(pairwise(edges), pairwise(found), strict=True)]


def size_of_blocks(places: int, device: torch.device) -> int:
    """The rows of the head's matrix that are multiplied at once."""
    return max(BLOCK_ELEMENTS[device.type] // max(places, 1), 256)
