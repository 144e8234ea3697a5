"""Autograd functions over the kernels: each is one pass over memory forward and one backward.

Contiguous CPU tensors in float32 or bfloat16; sums inside are always float32, and their order does not depend on the number of
threads. They work with checkpointing: the inputs of the backward pass are saved in the ordinary way.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.native.memory import address, keep_freed_memory, touch, zeros
from headrace.trainer.kernels import binding
from headrace.trainer.packing import Segment

# --- Weights as the kernels multiply by them
# Packed once for each of their values, or at every use.
#
# Contiguous CPU tensors in float32 or bfloat16.


SIDE = 32
"""The side of the blocks that products are computed in."""
ROOM = 64 << 20
"""Bytes that are touched at once."""
MOST_TOKENS = 2048
"""The most tokens that memory is reserved for: a budget may be far above the size of a batch."""


def kernels() -> Any:
    """The kernels, set to torch's present number of threads."""
    functions = binding.library()
    assert functions is not None
    functions.headrace_threads(torch.get_num_threads())
    return functions


class _Passes(threading.local):
    forward_only = False
    """Whether this thread makes no backward pass at the moment."""


_passes = _Passes()


@contextmanager
def forward_only() -> Iterator[None]:
    """Within this context weights are packed for the forward pass alone: no backward pass follows."""
    before, _passes.forward_only = _passes.forward_only, True
    try:
        yield
    finally:
        _passes.forward_only = before


class PackedWeight:
    """A matrix [n, k] as the kernels multiply by it, or several of one size that lie in one tensor. In bfloat16 it is packed once for each
    of its values, for both directions; in float32, where that would be 8 bytes a parameter, at every use (5 to 10 % of a product over
    1,024 rows).

    It also keeps the memory of the gradient: fresh pages cost more than what is computed into them.
    """

    def __init__(self, matrices: int = 1) -> None:
        self._matrices = matrices
        self._packed_from: list[tuple[int, int] | None] = [None, None]
        """The value that each direction was packed from."""
        self._packed: list[Tensor | None] = [None, None]
        self._gradient: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return PackedWeight(self._matrices)

    def packed(self, weight: Tensor, backward: bool = True) -> tuple[Tensor, Tensor | None]:
        """bfloat16, (for y = x Wᵀ, for dx = dy W if `backward`, and where no backward pass is excluded). Packed again if the weight was
        written to since."""
        now, wanted = (weight.data_ptr(), weight._version), (True, backward and not _passes.forward_only)
        stale = [side for side in (0, 1) if wanted[side] and self._packed_from[side] != now]
        if stale:
            matrices = weight.detach().reshape(self._matrices, -1, weight.shape[-1])
            for side in stale:
                if self._packed[side] is None:
                    self._packed[side] = zeros(self._matrices * _packed_size(matrices[0]), torch.bfloat16)
                self._packed_from[side] = now
            rooms = [room.view(self._matrices, -1) if room is not None else None for room in self._packed]
            for number, matrix in enumerate(matrices):
                into = [room[number] if room is not None and side in stale else None for side, room in enumerate(rooms)]
                _pack(matrix, *into)
        across, down = self._packed
        assert across is not None
        return across, down if wanted[1] else None

    def release(self) -> None:
        """Gives its memory back. The next use packs again."""
        self._packed, self._packed_from, self._gradient = [None, None], [None, None], None

    def gradient(self, weight: Tensor) -> tuple[Tensor, bool]:
        """(where to write the gradient, float32 [n, k]; whether to add to what is there)."""
        if weight.dtype != torch.float32:  # memory is dear there: none is kept
            return torch.empty(weight.shape, dtype=torch.float32), False
        held = weight.grad
        if held is not None and held.dtype == torch.float32 and held.is_contiguous():
            return held, True
        if self._gradient is None or self._gradient.numel() != weight.numel():
            self._gradient = touch(zeros(weight.numel(), torch.float32))
        return self._gradient.view(weight.shape), False


def _packed_size(weight: Tensor) -> int:
    n, k = weight.shape
    return -(-n // SIDE) * -(-k // SIDE) * SIDE * SIDE


def _pack(weight: Tensor, across: Tensor | None, down: Tensor | None) -> None:
    source = weight.detach().float().contiguous()
    wide = (down if across is None else across).dtype == torch.float32  # type: ignore[union-attr]
    kernels().headrace_pack_weight(wide, address(source), *weight.shape, address(across), address(down))


class _Room(threading.local):
    """The buffer in which float32 weights are packed: one for all layers, as large as the largest needs."""

    held: Tensor | None = None

    def __call__(self, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        if self.held is None or self.held.numel() < sum(sizes):
            self.held = zeros(sum(sizes), torch.float32)
        return self.held[: sum(sizes)].split(list(sizes))


_room = _Room()


def packed_in_room(weight: Tensor) -> Tensor:
    """float32, for y = x Wᵀ. Good until the next product of this thread."""
    (room,) = _room([_packed_size(weight)])
    _pack(weight, room, None)
    return room


def packed_now(weight: Tensor, dtype: torch.dtype, down: bool = False) -> Tensor:
    """The weight [n, k] rounded to `dtype` and packed for y = x Wᵀ, or `down` for dx = dy W: of what is small or used once."""
    room = torch.empty(_packed_size(weight), dtype=dtype)
    _pack(weight, None if down else room, room if down else None)
    return room


def operands(
    packed: Sequence[PackedWeight], weights: Sequence[Tensor], dtype: torch.dtype, backward: bool
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Returns for each weight the two packings that `binding.Weight` calls across and down. Each direction reads one of them."""
    if dtype == torch.bfloat16:
        return [packed_weight.packed(weight) for packed_weight, weight in zip(packed, weights, strict=True)]
    rooms = _room([_packed_size(weight) for weight in weights])
    held: list[tuple[Tensor | None, Tensor | None]] = [(None, room) if backward else (room, None) for room in rooms]
    for weight, into in zip(weights, held, strict=True):
        _pack(weight, *into)
    return held


def give(weight: Tensor, gradient: Tensor) -> None:
    """Adds a gradient to the weight's `.grad`, which may keep it."""
    if weight.grad is not None:
        weight.grad += gradient
    else:
        weight.grad = gradient if weight.dtype == gradient.dtype else gradient.to(weight.dtype)


def packed_of(module: Any) -> Iterator[tuple[PackedWeight, Tensor]]:
    """Yields what a module has packed, and the weight that it is packed from: one of a linear layer, two of experts."""
    if isinstance(packed := getattr(module, "packed", None), PackedWeight):
        yield packed, module.weight
    for name, packed in getattr(module, "packed_stacks", {}).items():
        yield packed, getattr(module, name)


def reserve(model: Any, tokens: int, dtype: torch.dtype) -> None:
    """Does in advance what would delay the first steps. Packs the weights for bfloat16, and makes the system allocate the memory of the
    weights that will change (until then they may be mapped from the file), of their gradients, of the optimizer's state, and of the
    activations of `tokens` tokens (at most MOST_TOKENS) in `dtype` that are kept for the backward pass."""
    keep_freed_memory()
    head = model.get_output_embeddings()
    layers = [pair for module in model.modules() if module is not head for pair in packed_of(module)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = sum(parameter.nbytes + 8 * parameter.numel() for parameter in trained)
    kept = dtype.itemsize * sum(sum(weight.shape[-2:]) for _, weight in layers) * min(tokens, MOST_TOKENS)
    rooms = [touch(torch.empty(ROOM, dtype=torch.uint8)) for _ in range((state + kept) // ROOM)]
    del rooms  # freed, and kept for later allocations
    for parameter in trained:
        parameter.data = parameter.data.clone()
    if hasattr(head, "packed") and dtype == torch.bfloat16:
        head.packed.packed(head.weight, backward=False)
    for packed, weight in layers:
        if dtype == torch.bfloat16:
            packed.packed(weight)
        if weight.requires_grad and weight.dtype == torch.float32:
            packed.gradient(weight)


def release(model: Any) -> None:
    """Gives the memory back that products keep from step to step: packed weights, and room for gradients and for packing."""
    for module in model.modules():
        for packed, _ in packed_of(module):
            packed.release()
    _room.held = None


# --- fused ops ------------------------------------------------------------


STRETCH = 32
"""Rows whose parts of a weight's gradient are summed together."""


# -- rows -------------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype, *, wide: bool = False) -> Tensor:
    """x / rms(x) · (weight + unit) over the last dimension, in `dtype` (arXiv:1910.07467). unit is 1 for Gemma, else 0. `wide`: only the
    weight is rounded to `dtype`; the result is float32."""
    return _Norm.apply(x, served(weight, dtype), eps, unit, torch.float32 if wide else dtype, None)


def add_rms_norm(total: Tensor, x: Tensor, *, weight: Tensor, eps: float, unit: float, dtype: torch.dtype) -> Tensor:
    """total + x / rms(x) · (weight + unit), all float32; the weight is rounded to `dtype`. Gemma adds the results of its layers so."""
    return _Norm.apply(x, served(weight, dtype), eps, unit, torch.float32, total.contiguous())


def served(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """float32, of numbers that `dtype` has: as the engine has it. The gradient passes as it is."""
    return _Rounded.apply(weight.float(), dtype) if dtype != torch.float32 else weight.float()


def rounded(x: Tensor) -> Tensor:
    """float32 x, of numbers that bfloat16 has."""
    return _Rounded.apply(x, torch.bfloat16)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return d_y, None


def valued(x: Tensor, value: Tensor) -> Tensor:
    """x with another value, which differs by rounding; the gradient passes as it is."""
    return _Valued.apply(x, value)


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return d_y, None


def _parts(rows: int, width: int, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """(a weight's gradient [width], room for its parts)."""
    if not wanted:
        return None, None
    return torch.empty(width), torch.empty(-(-rows // STRETCH), width)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, unit: float, dtype: torch.dtype, onto: Tensor | None
    ) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        y, scale = torch.empty(x.shape, dtype=dtype), torch.empty(rows)
        wide = x.dtype == torch.float32, dtype == torch.float32
        kernels().headrace_norm(*wide, *map(address, (x, weight, y, scale)), rows, width, eps, unit, address(onto))
        ctx.save_for_backward(x, weight, scale)
        ctx.unit, ctx.dtype = unit, dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        rows = x.numel() // width
        d_x = torch.empty_like(x)
        d_weight, parts = _parts(rows, width, ctx.needs_input_grad[1])
        wide = x.dtype == torch.float32, ctx.dtype == torch.float32
        d_y = d_y.contiguous()  # by a name: nothing else would hold a copy while the kernel reads it
        given = (x, weight, scale, d_y, d_x, d_weight, parts)
        kernels().headrace_norm_backward(*wide, *map(address, given), rows, width, ctx.unit)
        return d_x, d_weight, None, None, None, d_y if ctx.needs_input_grad[5] else None


def gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """act(gate) · up of one shape and dtype; act is SiLU or GELU's tanh form (arXiv:2002.05202)."""
    return _Gated.apply(gate, up, gelu)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        kernels().headrace_gated(gate.dtype == torch.float32, *map(address, (gate, up, y)), y.numel(), gelu)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        d_y = d_y.contiguous()  # see `_Norm.backward`
        given = map(address, (gate, up, d_y, d_gate, d_up))
        kernels().headrace_gated_backward(gate.dtype == torch.float32, *given, gate.numel(), ctx.gelu)
        return d_gate, d_up, None


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, weight: Tensor | None, eps: float, unit: float, dtype: torch.dtype
) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of x [N, heads, D] by cos and sin [N, D] float32, halves as in `rotate_half`; after
    an RMSNorm of each head if there is a weight [D]. The result is float32, rounded to `dtype`."""
    return _Rotary.apply(x, cos, sin, None if weight is None else served(weight, dtype), eps, unit, dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        weight: Tensor | None,
        eps: float,
        unit: float,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x, dtype=torch.float32)
        given = map(address, (x, y, cos, sin, weight))
        how = eps, unit, dtype != torch.float32
        kernels().headrace_rotary(x.dtype == torch.float32, *given, *x.shape, *how)
        ctx.save_for_backward(x if weight is not None else None, cos, sin, weight)
        ctx.constants, ctx.dtype = (eps, unit), x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, weight = ctx.saved_tensors
        d_y = d_y.contiguous()
        d_x = torch.empty_like(d_y, dtype=ctx.dtype)
        d_weight, parts = _parts(d_y.shape[0], d_y.shape[2], weight is not None and ctx.needs_input_grad[3])
        given = map(address, (x, d_y, d_x, cos, sin, weight, d_weight, parts))
        kernels().headrace_rotary_backward(ctx.dtype == torch.float32, *given, *d_y.shape, *ctx.constants)
        return d_x, None, None, d_weight, None, None, None


# -- attention --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """The segments of a pack as the kernels read them: int32 [segments] each."""

    start: Tensor
    length: Tensor
    parent: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        columns = [[s.start for s in segments], [s.length for s in segments], [s.parent for s in segments]]
        return cls(*(torch.tensor(column, dtype=torch.int32) for column in columns))

    def trees(self, q: Tensor, k: Tensor, scale: float, window: int) -> binding.Trees:
        return binding.Trees(
            tokens=len(q),
            segments=len(self.start),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[2],
            window=window,
            scale=scale,
            start=address(self.start),
            length=address(self.length),
            parent=address(self.parent),
        )


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int = 0) -> Tensor:
    """q [N, heads, D] and k [N, kv_heads, D] float32, v [N, kv_heads, D] -> [N, heads, D] in the dtype of v. A token attends
    to itself, to the earlier tokens of its segment, and to all ancestors of the segment, as far back as `window` tokens (0:
    all). No tensor of the size of the scores is kept. In bfloat16 q and k are rounded, and the forward pass is the engine's,
    block by block."""
    return _Attention.apply(q, k, v, segments, scale, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        wide, out = v.dtype == torch.float32, torch.empty_like(q, dtype=v.dtype)
        sums = torch.empty(*q.shape[:2], 2) if wide else None
        trees = segments.trees(q, k, scale, window)
        kernels().headrace_attention(wide, ctypes.byref(trees), *map(address, (q, k, v, out, sums)))
        ctx.save_for_backward(q, k, v, out if wide else None, sums)
        ctx.segments, ctx.constants = segments, (scale, window)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        trees = ctx.segments.trees(q, k, *ctx.constants)
        d_out = d_out.contiguous()  # see `_Norm.backward`
        given = map(address, (q, k, v, out, sums, d_out, d_q, d_k, d_v))
        kernels().headrace_attention_backward(v.dtype == torch.float32, ctypes.byref(trees), *given)
        return d_q, d_k, d_v, None, None, None
