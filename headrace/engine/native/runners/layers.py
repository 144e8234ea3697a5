"""Products of layers: a weight in its fastest layout, the experts of a mixture, and LoRA adapters beside the base weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import linear

from headrace.engine.native.forward_pass import ForwardInput
from headrace.engine.native.runners.families import Experts, Linear, Routing
from headrace.engine.native.runners.paged import EXACT_ROWS, in_pieces
from headrace.native.cuda_ops import wide_logits

# --- A weight in the layout in which multiplying by it is fastest.


_PACK_ROWS = 64
"""Rows that oneDNN lays the weight out for. It serves any other number too."""


class Matrix:
    """x [..., in] -> [..., out]."""

    def __init__(self, weights: Linear, pack: bool) -> None:
        self.weight, self.bias = weights
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), _PACK_ROWS) if pack else None
        if self.packed is not None:  # the packed copy serves instead
            del self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in] -> [R, out] for logits: in float32 on CUDA."""
        if not x.is_cuda:
            return self(x)
        out = wide_logits(x, self.weight)
        return out if self.bias is None else out + self.bias


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing pays: bfloat16 on a CPU that multiplies it itself. Measured: 20 to 45 % less time from 1 to 64 rows."""
    return device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


# --- Mixtures of experts
# The choice of experts, and the products of each expert with the rows that chose it.


Activation = Callable[[torch.Tensor], torch.Tensor]
"""[n, 2 * inner] -> [n, inner]: the gate's activation times up."""


@dataclass(frozen=True)
class Choice:
    """The router's choice, and the N * K assignments of tokens to experts."""

    experts: torch.Tensor
    """[N, K] int64, best first."""
    weights: torch.Tensor
    """[N, K] float32"""


def route(x: torch.Tensor, router: torch.Tensor, routing: Routing) -> Choice:
    """x [N, H], router [E, H]. Scores and softmax in float32: in bfloat16 neighbours would tie."""
    weights, experts = linear(x.float(), router).softmax(-1).topk(routing.chosen, dim=-1)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights)


class Stack:
    """Matrices [E, out, in] of all experts, ready to multiply."""

    def __init__(self, weight: torch.Tensor, pack: bool, exact: bool) -> None:
        self._exact = exact
        self._stacked = weight.mT if _groups(weight) else None
        self._single = [] if self._stacked is not None else [Matrix((matrix, None), pack) for matrix in weight]

    @property
    def static(self) -> bool:
        return self._stacked is not None

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """rows [n, in], those of expert 0 first, `counts` [E] of each -> [n, out]"""
        if self._stacked is not None:
            return torch.nn.functional.grouped_mm(rows, self._stacked, offs=counts.cumsum(0).to(torch.int32))
        parts = zip(self._single, rows.split(counts.tolist()), strict=True)
        return torch.cat([self._product(matrix, mine) for matrix, mine in parts if len(mine)])

    def _product(self, matrix: Matrix, rows: torch.Tensor) -> torch.Tensor:
        return in_pieces(matrix, rows, EXACT_ROWS) if self._exact else matrix(rows)


@dataclass(frozen=True)
class ExpertPair:
    """A LoRA adapter of every expert: x -> b(a(x)), the scale in b."""

    a: Stack
    b: Stack


@dataclass(frozen=True)
class Adapted:
    """An adapter of the layer's experts, and the tokens [start, stop) that use it."""

    gate_up: ExpertPair | None
    down: ExpertPair | None
    start: int
    stop: int


class Mixture:
    """The experts of one layer."""

    def __init__(
        self, experts: Experts, routing: Routing, activation: Activation, stack: Callable[[torch.Tensor], Stack]
    ) -> None:
        self.router, self.routing, self._activation = experts.router, routing, activation
        self._gate_up, self._down = stack(experts.gate_up), stack(experts.down)

    @property
    def static(self) -> bool:
        """Whether no shape depends on the choice."""
        return self._gate_up.static and self._down.static

    def __call__(self, x: torch.Tensor, choice: Choice, adapted: Sequence[Adapted] = ()) -> torch.Tensor:
        """x [N, H] -> [N, H] float32: the chosen experts' outputs, weighted and added best first."""
        assigned = choice.experts.flatten()
        order = assigned.argsort(stable=True)
        tokens, experts = order // self.routing.chosen, assigned[order]
        rows, counts = x[tokens], self._counts(experts)
        hidden = self._gate_up(rows, counts)
        mine = [((tokens >= part.start) & (tokens < part.stop)).nonzero()[:, 0] for part in adapted]
        for part, places in zip(adapted, mine, strict=True):
            self._add(part.gate_up, hidden, rows, experts, places)
        hidden = self._activation(hidden)
        out = self._down(hidden, counts)
        for part, places in zip(adapted, mine, strict=True):
            self._add(part.down, out, hidden, experts, places)
        back = torch.empty_like(out, dtype=torch.float32)
        back[order] = out.float()
        return (back.view(*choice.experts.shape, -1) * choice.weights[..., None]).sum(1)

    def _add(
        self,
        pair: ExpertPair | None,
        out: torch.Tensor,
        rows: torch.Tensor,
        experts: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        if pair is not None and len(places):
            counts = self._counts(experts[places])
            out.index_add_(0, places, pair.b(pair.a(rows[places], counts), counts))

    def _counts(self, experts: torch.Tensor) -> torch.Tensor:
        """[E] how often each occurs. (`bincount` would make a GPU wait.)"""
        counts = torch.zeros(self.routing.experts, dtype=torch.int64, device=experts.device)
        return counts.scatter_add_(0, experts, torch.ones_like(experts))


def _groups(weight: torch.Tensor) -> bool:
    """Whether torch multiplies all experts at once: bfloat16 on GPUs since Ampere, rows of 16 bytes. On a CPU it loops, as we
    do, but without packed weights."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    aligned = weight.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0
    return aligned and torch.cuda.get_device_capability(weight.device) >= (8, 0)


# --- LoRA adapters (Hu et al., arXiv:2106.09685) beside the base weights
# Several at once, never merged.
#
# A pass whose segments are sorted by adapter multiplies by the base weights once for all tokens; then each adapter adds its
# low-rank product to its own rows. `adapter_tensors.py` reads them.


PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The modules that each product of the fused decoder contains."""


@dataclass(frozen=True)
class Pair:
    """x -> x + b(a(x)) over the parts of one product: their ranks side by side, b block-diagonal with the scale in it."""

    a: torch.Tensor
    """[ranks, in]"""
    b: torch.Tensor
    """[out, ranks]"""

    def add(self, x: torch.Tensor, out: torch.Tensor, exact: bool) -> None:
        if exact:
            out += in_pieces(lambda rows: linear(linear(rows, self.a), self.b), x, EXACT_ROWS)
        else:
            out.addmm_(linear(x, self.a), self.b.T)


@dataclass(frozen=True)
class AdapterLayer:
    linears: dict[str, Pair]
    """The adapter's matrices by product. Products without an adapter are left out."""
    experts: dict[str, ExpertPair]
    """`gate_up`, `down`"""


@dataclass(frozen=True)
class Adapter:
    layers: list[AdapterLayer]


@dataclass(frozen=True)
class Groups:
    """The adapters of one pass, each with its tokens [start, stop)."""

    parts: Sequence[tuple[Adapter, int, int]]
    exact: bool

    def add(self, layer: int, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Adds the adapters' contribution to `out`, which holds the product `name` of x; returns `out`."""
        for adapter, start, stop in self.parts:
            if pair := adapter.layers[layer].linears.get(name):
                pair.add(x[start:stop], out[start:stop], self.exact)
        return out

    def of_experts(self, layer: int) -> list[Adapted]:
        """Returns the adapters of a layer's experts."""
        parts = [(adapter.layers[layer].experts, start, stop) for adapter, start, stop in self.parts]
        return [Adapted(pairs.get("gate_up"), pairs.get("down"), start, stop) for pairs, start, stop in parts if pairs]


class AdapterSlots:
    """The adapters of all slots at addresses that stay, for passes that are captured: matrices of all slots side by side, multiplied for all
    rows; what is not a row's own is set to zero between the two products. Costs slots times the work of one adapter, and no shape depends
    on which rows use which."""

    def __init__(self, count: int) -> None:
        self._adapters: list[Adapter | None] = [None] * count
        self._refusals = [""] * count
        self._pairs: list[dict[str, Pair]] = []
        """The pairs of each layer by product: a [slots * ranks, in] and b [out, slots * ranks]."""

    @torch.inference_mode()
    def put(self, slot: int, adapter: Adapter | None) -> bool:
        """Whether all addresses are still the same."""
        self._refusals[slot] = _not_static(adapter)
        self._adapters[slot] = None if self._refusals[slot] else adapter
        fits = self._fits(self._adapters[slot])
        if not fits:
            self._make_room()
        for index in range(len(self._adapters)) if not fits else [slot]:
            self._write(index)
        return fits

    def refusal(self, used: np.ndarray) -> str:
        """Empty, or the reason why one of these slots' adapters is not here. `used`: slots; -1: none."""
        return next((self._refusals[slot] for slot in np.unique(used[used >= 0]) if self._refusals[slot]), "")

    def masked(self, rows: torch.Tensor) -> Masked | None:
        """`rows` [N] int64: the slot of each row; -1: none."""
        if not any(self._pairs):
            return None
        slots = torch.arange(len(self._adapters), device=rows.device)
        return Masked(self._pairs, (rows[:, None] != slots)[..., None])

    def _fits(self, adapter: Adapter | None) -> bool:
        if adapter is None:
            return True
        return len(self._pairs) == len(adapter.layers) and all(
            name in room and len(pair.a) * len(self._adapters) <= len(room[name].a)
            for room, layer in zip(self._pairs, adapter.layers, strict=True)
            for name, pair in layer.linears.items()
        )

    def _make_room(self) -> None:
        there = [adapter for adapter in self._adapters if adapter is not None]
        self._pairs = [{} for _ in there[0].layers]
        for index, room in enumerate(self._pairs):
            found = [layer.layers[index].linears for layer in there]
            for name in PARTS:
                pairs = [linears[name] for linears in found if name in linears]
                if pairs:
                    ranks = max(len(pair.a) for pair in pairs) * len(self._adapters)
                    a, b = pairs[0].a, pairs[0].b
                    room[name] = Pair(a.new_zeros(ranks, a.shape[1]), b.new_zeros(len(b), ranks))

    def _write(self, slot: int) -> None:
        adapter = self._adapters[slot]
        for index, room in enumerate(self._pairs):
            for name, pair in room.items():
                ranks = len(pair.a) // len(self._adapters)
                mine = slice(slot * ranks, (slot + 1) * ranks)
                pair.a[mine] = 0
                pair.b[:, mine] = 0
                own = None if adapter is None else adapter.layers[index].linears.get(name)
                if own is not None:
                    pair.a[mine][: len(own.a)] = own.a
                    pair.b[:, mine][:, : len(own.a)] = own.b


@dataclass(frozen=True)
class Masked:
    """The adapters of one pass, by row."""

    pairs: Sequence[Mapping[str, Pair]]
    others: torch.Tensor
    """[N, slots, 1] bool: slots that are not the row's."""

    def add(self, layer: int, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Adds to `out` as `Groups.add` does."""
        if pair := self.pairs[layer].get(name):
            hidden = linear(x, pair.a).view(*self.others.shape[:2], -1).masked_fill(self.others, 0)
            out.addmm_(hidden.flatten(1), pair.b.T)
        return out

    def of_experts(self, layer: int) -> list[Adapted]:
        return []


def _not_static(adapter: Adapter | None) -> str:
    """Empty, or why a captured pass cannot have it."""
    if adapter is None:
        return ""
    if any(layer.experts for layer in adapter.layers):
        return "an adapter of experts, whose rows differ in number"
    parts = [part for layer in adapter.layers for pair in layer.linears.values() for part in (pair.a, pair.b)]
    if not all(bool(part.isfinite().all()) for part in parts):
        return "an adapter with numbers that are not finite, which would reach rows that do not use it"
    return ""


def by_adapter(batch: ForwardInput) -> tuple[ForwardInput, np.ndarray | None]:
    """The batch with its segments sorted by adapter, and where each token [N] went; None where nothing had to move."""
    if not len(batch.adapters) or (np.diff(batch.adapters) >= 0).all():
        return batch, None
    order, sizes = np.argsort(batch.adapters, kind="stable"), np.diff(batch.starts)
    starts = np.concatenate([[0], np.cumsum(sizes[order])]).astype(batch.starts.dtype)
    new_start = np.empty_like(batch.context)
    new_start[order] = starts[:-1]
    segments = batch.segments()
    went = np.arange(len(batch.tokens)) - batch.starts[segments] + new_start[segments]
    tokens = np.empty_like(batch.tokens)
    tokens[went] = batch.tokens
    moved = replace(
        batch,
        tokens=tokens,
        starts=starts,
        context=batch.context[order],
        tables=batch.tables[order],
        rows=went[batch.rows],
        adapters=batch.adapters[order],
    )
    return moved, went


def groups(batch: ForwardInput, slots: Sequence[Adapter | None], exact: bool) -> Groups | None:
    """`batch`: sorted by adapter. Returns None if no row uses one."""
    parts = []
    for slot in np.unique(batch.adapters[batch.adapters >= 0]):
        first, last = np.searchsorted(batch.adapters, [slot, slot + 1])
        adapter = slots[slot]
        assert adapter is not None, f"a request uses the empty adapter slot {slot}"
        parts.append((adapter, int(batch.starts[first]), int(batch.starts[last])))
    return Groups(parts, exact) if parts else None
