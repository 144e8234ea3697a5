"""Products of layers: a weight in its fastest layout, the experts of a mixture, and LoRA adapters beside the base weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import linear

from headrace.engine.native.forward_pass import ForwardInput
from headrace.engine.native.runners.paged import EXACT_ROWS, in_pieces
from headrace.engine.native.runners.weight_places import Experts, Linear
from headrace.engine.own_families import Routing
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


def route(x: torch.Tensor, router: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Choice:
    """x [N, H], router [E, H], bias [E]. Scores and softmax in float32: in bfloat16 neighbours would tie."""
    weights, experts = linear(x.float(), router, bias).softmax(-1).topk(routing.chosen, dim=-1)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights)


ALIGNED = 8
"""Numbers of which rows and columns are whole multiples where torch multiplies all experts at once: 16 bytes."""


class Stack:
    """Matrices [E, out, in] of all experts, ready to multiply."""

    def __init__(self, weight: torch.Tensor, pack: bool, exact: bool) -> None:
        self._exact = exact
        self._stacked = weight.mT if _groups(weight) else None
        self._single = [] if self._stacked is not None else [Matrix((matrix, None), pack) for matrix in weight]

    @property
    def static(self) -> bool:
        return self._stacked is not None

    @property
    def matrices(self) -> torch.Tensor:
        """[E, out, in] of a stack that is not packed."""
        return self._stacked.mT if self._stacked is not None else torch.stack([one.weight for one in self._single])

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
    experts: int


@dataclass(frozen=True)
class Adapted:
    """An adapter of the layer's experts, and the tokens [start, stop) that use it."""

    gate_up: ExpertPair | None
    down: ExpertPair | None
    start: int
    stop: int

    def among(self, tokens: torch.Tensor) -> torch.Tensor:
        """Indices of the assigned tokens [A] that use this adapter."""
        return ((tokens >= self.start) & (tokens < self.stop)).nonzero()[:, 0]

    def add(
        self, pair: ExpertPair | None, out: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor, mine: torch.Tensor
    ) -> None:
        """Adds to `out` what the adapter makes of the assigned `rows`. `mine`: as `among` returns it."""
        if pair is not None and len(mine):
            counts = _counts(experts[mine], pair.experts)
            out.index_add_(0, mine, pair.b(pair.a(rows[mine], counts), counts))


@dataclass(frozen=True)
class AdaptedSlots:
    """The adapters of the layer's experts of all slots side by side, of which each row uses one or none: no shape depends on which."""

    gate_up: ExpertPair | None
    down: ExpertPair | None
    others: torch.Tensor
    """[N, slots, 1] bool: slots that are not the row's."""

    def among(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.others[tokens]

    def add(
        self, pair: ExpertPair | None, out: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor, mine: torch.Tensor
    ) -> None:
        if pair is not None:
            counts = _counts(experts, pair.experts)
            hidden = pair.a(rows, counts).view(*mine.shape[:2], -1).masked_fill(mine, 0)
            out += pair.b(hidden.flatten(1), counts)


class Mixture:
    """The experts of one layer."""

    def __init__(
        self, experts: Experts, routing: Routing, activation: Activation, stack: Callable[[torch.Tensor], Stack]
    ) -> None:
        self.router, self.routing, self._activation = experts.router, routing, activation
        self._gate_up, self._down = stack(experts.gate_up), stack(experts.down)
        self.router_bias, self._gate_up_bias, self._down_bias = (
            experts.router_bias,
            experts.gate_up_bias,
            experts.down_bias,
        )

    @property
    def static(self) -> bool:
        """Whether no shape depends on the choice."""
        return self._gate_up.static and self._down.static

    def __call__(self, x: torch.Tensor, choice: Choice, adapted: Sequence[Adapted | AdaptedSlots] = ()) -> torch.Tensor:
        """x [N, H] -> [N, H] float32: the chosen experts' outputs, weighted and added best first."""
        assigned = choice.experts.flatten()
        order = assigned.argsort(stable=True)
        tokens, experts = order // self.routing.chosen, assigned[order]
        rows, counts = x[tokens], _counts(experts, self.routing.experts)
        hidden = _biased(self._gate_up(rows, counts), self._gate_up_bias, experts)
        mine = [part.among(tokens) for part in adapted]
        for part, users in zip(adapted, mine, strict=True):
            part.add(part.gate_up, hidden, rows, experts, users)
        hidden = self._activation(hidden)
        out = _biased(self._down(hidden, counts), self._down_bias, experts)
        for part, users in zip(adapted, mine, strict=True):
            part.add(part.down, out, hidden, experts, users)
        back = torch.empty_like(out, dtype=torch.float32)
        back[order] = out.float()
        return (back.view(*choice.experts.shape, -1) * choice.weights[..., None]).sum(1)


def _biased(rows: torch.Tensor, biases: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
    """rows [n, out], biases [E, out], experts [n]: each row with the bias of its expert."""
    return rows if biases is None else rows + biases[experts]


def _counts(experts: torch.Tensor, count: int) -> torch.Tensor:
    """[E] how often each of `count` occurs. (`bincount` would make a GPU wait.)"""
    counts = torch.zeros(count, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts, torch.ones_like(experts))


def _groups(weight: torch.Tensor) -> bool:
    """Whether torch multiplies all experts at once: bfloat16 on GPUs since Ampere, rows of 16 bytes. On a CPU it loops, as we
    do, but without packed weights."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    aligned = weight.shape[-1] % ALIGNED == 0 and weight.shape[-2] % ALIGNED == 0
    return aligned and torch.cuda.get_device_capability(weight.device) >= (8, 0)


# --- LoRA adapters (Hu et al., arXiv:2106.09685) beside the base weights
# Several at once, never merged.
#
# A pass whose segments are sorted by adapter multiplies by the base weights once for all tokens; then each adapter adds its
# low-rank product to its own rows. `adapter_tensors.py` reads them.


PARTS = ("qkv", "out", "gate_up", "down")
"""The products of a layer; `families.products` tells the modules that each contains."""


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
    per_layer: Pair | None = None
    """The adapter of the product that is added to the embeddings of single layers."""


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
        self._experts: list[dict[str, tuple[torch.Tensor, torch.Tensor, ExpertPair]]] = []
        """Pairs of experts: a [E, slots * ranks, in], b [E, out, slots * ranks], and the same as stacks."""

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
        if not any(self._pairs) and not any(self._experts):
            return None
        slots = torch.arange(len(self._adapters), device=rows.device)
        return Masked(self._pairs, [_stacks(room) for room in self._experts], (rows[:, None] != slots)[..., None])

    def _fits(self, adapter: Adapter | None) -> bool:
        if adapter is None:
            return True
        return (
            len(self._pairs) == len(adapter.layers)
            and all(
                name in room and len(pair.a) * len(self._adapters) <= len(room[name].a)
                for room, layer in zip(self._pairs, adapter.layers, strict=True)
                for name, pair in layer.linears.items()
            )
            and all(
                name in room and pair.a.matrices.shape[1] * len(self._adapters) <= room[name][0].shape[1]
                for room, layer in zip(self._experts, adapter.layers, strict=True)
                for name, pair in layer.experts.items()
            )
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
        self._experts = [
            self._room_of_experts([one.layers[index].experts for one in there]) for index in range(len(there[0].layers))
        ]

    def _room_of_experts(
        self, found: Sequence[Mapping[str, ExpertPair]]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor, ExpertPair]]:
        """Ranks are whole multiples of `ALIGNED`, so that all experts are multiplied at once."""
        room = {}
        for name in ("gate_up", "down"):
            if pairs := [(one[name].a.matrices, one[name].b.matrices) for one in found if name in one]:
                ranks = -(-max(a.shape[1] for a, _ in pairs) // ALIGNED) * ALIGNED * len(self._adapters)
                (a, b), *_ = pairs
                a, b = a.new_zeros(len(a), ranks, a.shape[2]), b.new_zeros(len(b), b.shape[1], ranks)
                room[name] = a, b, ExpertPair(Stack(a, False, False), Stack(b, False, False), len(a))
        return room

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
        for index, of_experts in enumerate(self._experts):
            for name, (a, b, _) in of_experts.items():
                ranks = a.shape[1] // len(self._adapters)
                a, b = a[:, slot * ranks : (slot + 1) * ranks], b[..., slot * ranks : (slot + 1) * ranks]
                a.zero_()
                b.zero_()
                mine_of = None if adapter is None else adapter.layers[index].experts.get(name)
                if mine_of is not None:
                    a[:, : mine_of.a.matrices.shape[1]] = mine_of.a.matrices
                    b[..., : mine_of.a.matrices.shape[1]] = mine_of.b.matrices


@dataclass(frozen=True)
class Masked:
    """The adapters of one pass, by row."""

    pairs: Sequence[Mapping[str, Pair]]
    experts: Sequence[Mapping[str, ExpertPair]]
    others: torch.Tensor
    """[N, slots, 1] bool: slots that are not the row's."""

    def add(self, layer: int, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Adds to `out` as `Groups.add` does."""
        if pair := self.pairs[layer].get(name):
            hidden = linear(x, pair.a).view(*self.others.shape[:2], -1).masked_fill(self.others, 0)
            out.addmm_(hidden.flatten(1), pair.b.T)
        return out

    def of_experts(self, layer: int) -> list[AdaptedSlots]:
        pairs = self.experts[layer]
        return [AdaptedSlots(pairs.get("gate_up"), pairs.get("down"), self.others)] if pairs else []


def _stacks(room: Mapping[str, tuple[torch.Tensor, torch.Tensor, ExpertPair]]) -> dict[str, ExpertPair]:
    return {name: stacks for name, (_, _, stacks) in room.items()}


def _not_static(adapter: Adapter | None) -> str:
    """Empty, or why a captured pass cannot have it."""
    if adapter is None:
        return ""
    pairs = [pair for layer in adapter.layers for pair in layer.experts.values()]
    if any(pair.a.matrices.shape[2] % ALIGNED or pair.b.matrices.shape[1] % ALIGNED for pair in pairs):
        return f"an adapter of experts whose widths are not multiples of {ALIGNED}, which are multiplied one by one"
    parts = [part for layer in adapter.layers for pair in layer.linears.values() for part in (pair.a, pair.b)]
    parts += [stack.matrices for pair in pairs for stack in (pair.a, pair.b)]
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
