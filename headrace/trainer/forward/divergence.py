"""The divergence of the policy from a teacher at each place, over the whole vocabulary, from hidden states: logits [M, V] never exist.

Both heads are walked together in blocks of the vocabulary: once for the log-sum-exps, once for the divergence, and once more, with those of the policy
alone, for the gradient, which goes to the policy. Of the policy's head a rank may hold some rows (`head.OwnRows`); of the teacher's it has all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.cuda_ops import wide_logits
from headrace.trainer.forward.head import Head, OwnRows, Scale, held, size_of_blocks, token_logprobs
from headrace.trainer.packing import Kept

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from headrace.algo.recipe_parts import Distill
    from headrace.trainer.forward.fused.fused_ops import PackedWeight


class AskedLogprobs(NamedTuple):
    """Places and the ids whose log-probs are wanted there."""

    predictor: Int[Tensor, " M"]
    target: Int[Tensor, " M"]
    kept: Kept | None
    """[M] the ids that log-probs are among; None: the whole vocabulary."""
    temperature: float


class HeadOf(NamedTuple):
    """A model's head, and the hidden states that it is applied to."""

    hidden: Float[Tensor, "U H"]
    weight: Float[Tensor, "V H"]
    """[V, H]; may be split over ranks by rows."""
    bias: Float[Tensor, " V"] | None
    scale: Scale
    dtype: torch.dtype
    """The dtype of the computation, to which states and matrix are rounded. Logits are float32."""
    packed: PackedWeight | None = None
    """The matrix for the kernels, where these are used."""
    backend: str = ""
    """The backend of torch.compile (`head.token_logprobs`)."""

    def logprobs(self, asked: AskedLogprobs) -> Head:
        """Answers a question. Places are those of the hidden states."""
        return token_logprobs(
            self.hidden,
            self.weight,
            self.bias,
            asked.predictor,
            asked.target,
            temperature=asked.temperature,
            dtype=self.dtype,
            kept=asked.kept,
            softcap=self.scale.softcap,
            packed=self.packed,
            backend=self.backend,
        )

    def at(self, places: Int[Tensor, " U"], temperature: float) -> HeadOf:
        """The head on the states of these places, whose logits are divided by the temperature."""
        scale = self.scale._replace(temperature=temperature)
        return self._replace(hidden=self.hidden.index_select(0, places), scale=scale)

    def block(self, rows: slice) -> Float[Tensor, "U block"]:
        """[U, block] float32 logits of these rows."""
        hidden, weight = self.hidden.to(self.dtype), self.weight[rows].to(self.dtype)
        if not hidden.is_cuda:  # a product in bfloat16 would be rounded to it
            hidden, weight = hidden.float(), weight.float()
        with torch.autocast(hidden.device.type, enabled=False):
            logits = wide_logits(hidden, weight)
        if self.bias is not None:
            logits += self.bias[rows]
        return self.scale.of(logits)


class _Rows(NamedTuple):
    """The rows of heads that are walked: the first ones of the whole vocabulary up to `end`, as far as this rank has them."""

    end: int
    share: OwnRows | None

    def blocks(self, policy: HeadOf) -> Iterator[tuple[slice, slice]]:
        """Yields blocks of this rank's rows, and where they lie in the whole vocabulary."""
        first = self.share.start if self.share else 0
        count = min(len(policy.weight), max(self.end - first, 0))
        size = size_of_blocks(len(policy.hidden), policy.hidden.device)
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield slice(start, stop), slice(first + start, first + stop)


def divergence(policy: HeadOf, teacher: HeadOf, rule: Distill) -> Float[Tensor, " U"]:
    """[U] in nats, float32, with gradient by the policy's states and head: forward KL(T ‖ S), reverse KL(S ‖ T), or jsd
    β·KL(T ‖ M) + (1 - β)·KL(S ‖ M) with M = β·T + (1 - β)·S (GKD, arXiv 2306.13649, eq. 1).

    Compared are the rows that both matrices have: of a family's models, the larger ones may have more of them behind the tokenizer's last id, which stand
    for nothing. No factor of temperature²: `algo.distill.coef` is the place for one.
    """
    weight, bias, share = held(policy.weight, policy.bias)
    rows = min(policy.weight.shape[0], teacher.weight.shape[0])
    given = policy._replace(weight=weight, bias=bias)
    return _Divergence.apply(policy.hidden, weight, bias, given, teacher, _Rows(rows, share), rule)


class _Divergence(torch.autograd.Function):
    """hidden [U, H], weight [V, H], bias [V] -> [U]. Keeps both models' states and heads, and two numbers of each place.

    By a logit of the policy, of probability s and log-prob l_S, the derivative is p - s·Σp: p = -t for forward, s·(l_S - l_T) for reverse, and
    s·(1 - β)·(l_S - l_M) for jsd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        policy: HeadOf,
        teacher: HeadOf,
        rows: _Rows,
        rule: Distill,
    ) -> Tensor:
        policy = policy._replace(hidden=hidden, weight=weight, bias=bias)
        logsumexps = _logsumexps(policy, teacher, rows)
        value, pulled = torch.zeros_like(logsumexps[0]), torch.zeros_like(logsumexps[0])
        for block, place in rows.blocks(policy):
            own, other = policy.block(block) - logsumexps[0][:, None], teacher.block(place) - logsumexps[1][:, None]
            part, pull = _compared(own, other, rule)
            value += part.sum(1)
            pulled += pull.sum(1)
        if rows.share:
            value, pulled = rows.share.sum(torch.stack([value, pulled]))
        ctx.save_for_backward(hidden, weight, bias, teacher.hidden, teacher.weight, teacher.bias, *logsumexps, pulled)
        ctx.given = policy.scale, policy.dtype, teacher.scale, teacher.dtype, rows, rule
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, states, matrix, offset, of_policy, of_teacher, pulled = ctx.saved_tensors
        scale, dtype, scale_of_teacher, dtype_of_teacher, rows, rule = ctx.given
        policy = HeadOf(hidden, weight, bias, scale, dtype)
        teacher = HeadOf(states, matrix, offset, scale_of_teacher, dtype_of_teacher)
        low = hidden.to(dtype)
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        # rows that are not compared have none
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = None if bias is None else torch.zeros_like(bias)
        for block, place in rows.blocks(policy):
            logits = policy.block(block)
            own = logits - of_policy[:, None]
            _, pull = _compared(own, teacher.block(place) - of_teacher[:, None], rule)
            d_logits = pull.sub_(own.exp_().mul_(pulled[:, None])).mul_(grad[:, None]).mul_(scale.slope(logits))
            if d_bias is not None:
                d_bias[block] = d_logits.sum(0)
            lowered = d_logits.to(dtype)
            d_hidden += lowered @ weight[block].to(dtype)
            if d_weight is not None:
                d_weight[block] = (lowered.t() @ low).to(weight.dtype)
        if rows.share:
            rows.share.sum(d_hidden)
        return d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None


def _compared(own: Tensor, other: Tensor, rule: Distill) -> tuple[Tensor, Tensor]:
    """([U, block] what each token adds to the divergence, [U, block] p of `_Divergence`), from log-probs of policy and teacher."""
    match rule.kind:
        case "forward":
            probability = other.exp()
            return probability * (other - own), -probability
        case "reverse":
            pull = own.exp() * (own - other)
            return pull, pull.clone()
        case _:
            share = torch.tensor(rule.beta, device=own.device)
            mixture = torch.logaddexp(other + share.log(), own + torch.log1p(-share))
            pull = (1 - rule.beta) * own.exp() * (own - mixture)
            return rule.beta * other.exp() * (other - mixture) + pull, pull


def _logsumexps(policy: HeadOf, teacher: HeadOf, rows: _Rows) -> Tensor:
    """[2, U] of the policy's logits and of the teacher's."""
    found = policy.hidden.new_full((2, len(policy.hidden)), -torch.inf, dtype=torch.float32)
    for block, place in rows.blocks(policy):
        new = torch.stack([policy.block(block).logsumexp(1), teacher.block(place).logsumexp(1)])
        found = torch.logaddexp(found, new)
    if rows.share is None:
        return found
    highest = found.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=rows.share.group)
    return highest + rows.share.sum((found - highest).exp()).log()


@torch.no_grad()
def most_probable(head: HeadOf, k: int, rows: int) -> Int[Tensor, "U k"]:
    """[U, k] the ids of the largest logits of each place, among the first `rows` ids; all of them if there are fewer than k."""
    weight, bias, share = held(head.weight, head.bias)
    head, walked = head._replace(weight=weight, bias=bias), _Rows(rows, share)
    values = head.hidden.new_empty((len(head.hidden), 0), dtype=torch.float32)
    ids = torch.empty_like(values, dtype=torch.int64)
    for block, place in walked.blocks(head):
        logits = head.block(block)
        number = torch.arange(place.start, place.stop, device=ids.device).expand_as(logits)
        values, ids = _largest(torch.cat([values, logits], 1), torch.cat([ids, number], 1), k)
    return ids if share is None else _largest(*_of_all(values, ids, min(k, rows), share), k)[1]


def _largest(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = values.topk(min(k, values.shape[1]))
    return found.values, ids.gather(1, found.indices)


def _of_all(values: Tensor, ids: Tensor, k: int, share: OwnRows) -> tuple[Tensor, Tensor]:
    """Joins those of all ranks; one that has fewer than k is filled up with none."""
    missing = k - values.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    ranks = dist.get_world_size(share.group)
    everyone = [torch.empty_like(values) for _ in range(ranks)], [torch.empty_like(ids) for _ in range(ranks)]
    dist.all_gather(everyone[0], values, group=share.group)
    dist.all_gather(everyone[1], ids, group=share.group)
    return torch.cat(everyone[0], 1), torch.cat(everyone[1], 1)
