"""Operations on CUDA that engine and trainer share: attention over ragged sequences, and logits in float32."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

# --- Attention over ragged sequences in one call
# Attention over ragged sequences in one call, by the kernel that torch has for CUDA (FlashAttention's, `torch.nn.attention.varlen`).
#
# Every sequence has queries and keys, and sees causally with both ends aligned: its last query sees all its keys, the one before it all but
# one. The kernel is tried before it is trusted, with gradients, because versions of torch differ in what it accepts.


@dataclass
class Layout:
    """The sequences of one call. The keys of a sequence lie behind each other, in its order."""

    query_starts: Tensor
    """[S + 1] int32"""
    key_starts: Tensor
    """[S + 1] int32"""
    longest_query: int
    longest_key: int


class Kernel(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, /, *, scale: float | None, reach: int
    ) -> Tensor:
        """query [Q, H, D], key and value [K, H_kv, D] -> [Q, H, D]. `reach`: keys that a query sees; 0: all before it."""
        ...


@cache
def varlen_kernel(device: torch.device, dtype: torch.dtype, width: int) -> Kernel | None:
    """Returns torch's kernel if there is one for this device and head width, and if its numbers are right; else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        return _flash if is_right(_flash, device, dtype, width) else None
    except (ImportError, TypeError, RuntimeError):  # an older torch, or an older device
        return None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scale: float | None, reach: int
) -> Tensor:  # pragma: no cover - needs CUDA
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _names_groups() else {}
    out = varlen_attn(
        query,
        key,
        value,
        layout.query_starts,
        layout.key_starts,
        layout.longest_query,
        layout.longest_key,
        scale=scale,
        window_size=(reach - 1 if reach else -1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _names_groups() -> bool:  # pragma: no cover - needs CUDA
    """Whether heads that share keys have to be announced: torch 2.11 takes them without, and knows no such argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# -- the trial ------------------------------------------------------------------------------------------------------------------

_QUERIES, _KEYS = (19, 7, 5, 11), (19, 26, 31, 30)


def is_right(kernel: Kernel, device: torch.device, dtype: torch.dtype, width: int = 64) -> bool:
    """Whether output and gradients are those of masked attention in float32, on a few sequences, with and without a window."""
    queries, keys = ([0, *accumulate(counts)] for counts in (_QUERIES, _KEYS))
    starts = [torch.tensor(places, dtype=torch.int32, device=device) for places in (queries, keys)]
    layout = Layout(starts[0], starts[1], max(_QUERIES), max(_KEYS))
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries[-1], 4, width), (keys[-1], 2, width), (keys[-1], 2, width))
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    slope = torch.randn(queries[-1], 4, width, generator=generator).to(device)
    for reach in (0, 4):
        actual = _with_gradients(
            lambda q, k, v, reach=reach: kernel(q, k, v, layout, scale=None, reach=reach), given, slope
        )
        expected = _with_gradients(
            lambda q, k, v, reach=reach: _one_by_one(queries, keys, q=q, k=k, v=v, reach=reach),
            [x.float() for x in given],
            slope,
        )
        for one, other in zip(actual, expected, strict=True):
            if not (one.float() - other).abs().max() <= 0.1 * other.square().mean().sqrt():
                return False
    return True


def _with_gradients(function: Callable[..., Tensor], given: Sequence[Tensor], slope: Tensor) -> list[Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [x.clone().requires_grad_() for x in given]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad((out.float() * slope).sum(), inputs)]


def _one_by_one(queries: Sequence[int], keys: Sequence[int], *, q: Tensor, k: Tensor, v: Tensor, reach: int) -> Tensor:
    outputs = []
    for i in range(len(queries) - 1):
        mine, theirs = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        count, total = mine.stop - mine.start, theirs.stop - theirs.start
        distance = torch.arange(total - count, total)[:, None] - torch.arange(total)
        seen = (distance >= 0) & (distance < (reach or total))
        one, two, three = (x[part].transpose(0, 1)[None] for x, part in ((q, mine), (k, theirs), (v, theirs)))
        out = scaled_dot_product_attention(one, two, three, attn_mask=seen.to(q.device), enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


# --- Logits in float32 from factors in half precision.


def wide_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, H], weight [V, H] -> [R, V] float32. The product of half-precision matrices is rounded to half precision, which knows a logit of
    20 to 1/16; on CUDA its sums are returned as they are. Autograd is not recorded there."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x, weight).float()
