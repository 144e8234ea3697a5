"""The `Runner` over the C++ decoder: the known families on a CPU, in bfloat16 or float32.

The result for a token depends on the token's own sequence alone: every sum has a fixed order, prefill and decoding are
one path, and blocks that sequences share are only read together. So `exact` costs nothing here.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from headrace.core.weights import AdapterSpec
from headrace.engine.native.forward_pass import BLOCK, ForwardInput, ForwardOutput, PassCounts
from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.drawing import LogitRows
from headrace.engine.native.runners import skeleton
from headrace.engine.native.runners.adapter_tensors import read_adapter
from headrace.engine.native.runners.families import query_factors, read_spec, rotary_tables
from headrace.engine.native.runners.families import refusal as family_refusal
from headrace.engine.native.runners.layers import PARTS, Pair
from headrace.engine.native.runners.skeleton import Skeleton
from headrace.engine.native.runners.weight_places import (
    Dense,
    Experts,
    LayerSpec,
    LayerWeights,
    RecurrenceWeights,
    Spec,
    Tensors,
    read_weights,
)
from headrace.engine.native.sampler import score
from headrace.engine.own_families import DeltaRule, Recurrence, StateSpace
from headrace.native.arithmetic import arithmetic
from headrace.native.memory import address, contiguous, zeros

# --- Weights in the layout of `native/src/product.h`.


SIDE = 32
"""Rows and columns of a block; outputs of a panel."""


ARENA = 32 * 2**20
"""Numbers taken from the system at once."""


ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "squared")
"""Activations, in the order of `Activation` of `src/decoder.h`."""


INT8_LEVELS = 127
"""Steps on either side of zero that weights of eight bits have."""


def padded(count: int) -> int:
    return -(-count // SIDE) * SIDE


def gate_up_order(inner: int, alternating: bool = False) -> np.ndarray:
    """Rows of [gate; up] so that sixteen gates and their sixteen ups lie in one panel. `alternating`: of [gate 0; up 0; gate 1; ...]."""
    rows = np.arange(2 * inner, dtype=np.int32)
    both = rows.reshape(inner, 2).T if alternating else rows.reshape(2, inner)
    return both.reshape(2, inner // 16, 16).swapaxes(0, 1).ravel()


class Packer:
    """Packs matrices and keeps alive all that the C++ side is pointed to."""

    def __init__(self, library: Any, dtype: torch.dtype = torch.bfloat16, levels: int = 0) -> None:
        """`dtype`: the dtype in which the library stores weights. `levels`: steps on either side of zero that a quantised weight can have,
        127 in eight bits; 0 leaves weights as they are."""
        self._library, self._levels = library, levels
        self._kept: list[Any] = []
        self._arenas = {kind: torch.zeros(0, dtype=kind) for kind in (dtype, torch.int8)}
        self._dtype = dtype

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to large pages, because rows of an embedding are read in random order."""
        return self._room(tensor.numel(), self._dtype).view(tensor.shape).copy_(tensor)

    def linear(
        self,
        weights: tuple[torch.Tensor, torch.Tensor | None],
        order: np.ndarray | None = None,
        factors: torch.Tensor | None = None,
    ) -> binding.Linear:
        """`order`: which row of the weight becomes which output, one of them perhaps several; -1 leaves an output zero. `factors` [out] of the rows' products,
        their biases aside."""
        weight, bias = weights
        packed = self.experts(weight[None], None if bias is None else bias[None], order)
        packed.factors = self.wide(
            factors if factors is None or order is None else factors[torch.from_numpy(order).long()]
        )
        return packed

    def experts(
        self, stack: torch.Tensor, biases: torch.Tensor | None = None, order: np.ndarray | None = None
    ) -> binding.Linear:
        """Packs matrices [E, out, in] consecutively. `biases` [E, out]"""
        packed = self._matrices(stack, order)
        ordered = biases if biases is None or order is None else biases[:, torch.from_numpy(order).long()]
        packed.bias = self.wide(ordered)
        return packed

    def _matrices(self, stack: torch.Tensor, order: np.ndarray | None) -> binding.Linear:
        stack, (count, outputs, inputs) = stack.contiguous(), stack.shape
        rows = np.arange(outputs, dtype=np.int32) if order is None else order
        outputs = len(rows)
        size = count * padded(outputs) * padded(inputs)
        if self._levels:
            codes, scales = self._room(size, torch.int8).view(count, -1), torch.empty(count, padded(outputs))
            for matrix, *room in zip(stack, codes, self.keep(scales), strict=True):
                own = binding.Linear(n=outputs, k=inputs, codes=address(room[0]), scales=address(room[1]))
                self._library.headrace_quantise(address(matrix), address(rows), self._levels, ctypes.byref(own))
            return binding.Linear(n=outputs, k=inputs, codes=address(codes), scales=address(scales))
        packed = self._room(size, self._dtype).view(count, -1)
        for matrix, room in zip(stack, packed, strict=True):
            self._library.headrace_pack(address(matrix), inputs, address(rows), outputs, address(room))
        return binding.Linear(packed=address(packed), n=outputs, k=inputs)

    def _room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates `count` elements from a large arena, so that consecutive matrices are adjacent in memory."""
        if count > len(self._arenas[dtype]):
            self._arenas[dtype] = self.keep(zeros(max(count, ARENA), dtype))
        room, self._arenas[dtype] = self._arenas[dtype][:count], self._arenas[dtype][count:]
        return room

    def wide(self, weight: torch.Tensor | None) -> int | None:
        """[..., n] in float32, each row padded with zeros."""
        if weight is None:
            return None
        return address(
            self.keep(pad(weight.float(), (0, padded(weight.shape[-1]) - weight.shape[-1])).contiguous().clone())
        )


# --- runner ------------------------------------------------------------


WIDEST_HEAD, MOST_EXPERTS, LONGEST_CONVOLUTION = 512, 1024, 16
"""Sizes of stack buffers of the C++ side."""
PLACES = (*PARTS, "per_layer_gate", "per_layer_out", "into_recurrence", "out_of_recurrence")
"""Products of a layer that adapters may change, in the order of the C++ side."""
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Weights and cache can be stored in, each by a library of its own."""


def refusal(skeleton: Skeleton, dtype: torch.dtype, device: torch.device) -> str:
    """Empty if the kernels serve this model here; else the reason why not, a whole clause."""
    if device.type != "cpu":
        return f"they run on a CPU, and the device is {device.type}"
    if dtype not in DTYPES:
        return f"they store bfloat16 or float32, and not {dtype}"
    if reason := family_refusal(skeleton):
        return reason
    spec = read_spec(skeleton)
    if spec.routing is not None and spec.routing.experts > MOST_EXPERTS:
        return f"it has {spec.routing.experts} experts a layer, and they hold {MOST_EXPERTS}"
    if spec.hidden % 16 and any(layer.kernel for layer in spec.layers):
        return f"its convolutions are over {spec.hidden} numbers (hidden_size), and that must be a multiple of 16"
    if any(layer.kernel > LONGEST_CONVOLUTION for layer in spec.layers):
        return f"its convolutions are over more than {LONGEST_CONVOLUTION} tokens"
    for found in {layer.recurrence for layer in spec.layers if layer.recurrence}:
        if odd := [width for width in (found.key_width, found.value_width) if width % 16]:
            named = (
                "mamba_d_state, mamba_d_head; ssm_state_size, mamba_head_dim"
                if isinstance(found, StateSpace)
                else "linear_key_head_dim, linear_value_head_dim"
            )
            return f"its recurrence has heads that are {odd[0]} wide ({named}), and that must be a multiple of 16"
    for width in {layer.head_dim for layer in spec.layers if layer.attends}:
        if width % 16 or width > WIDEST_HEAD:
            return f"its heads are {width} wide (head_dim), and that must be a multiple of 16 up to {WIDEST_HEAD}"
    if spec.per_layer % 16:
        return f"its layers have embeddings of their own that are {spec.per_layer} wide (hidden_size_per_layer_input), and that must be a multiple of 16"
    if odd := [width for layer in spec.layers for width in (layer.inner, layer.shared) if width % 16]:
        return f"its feed-forward part is {odd[0]} wide (intermediate_size), and that must be a multiple of 16"
    if binding.library(dtype=DTYPES[dtype]) is None:
        return "they could not be built on this machine (`headrace doctor` tells of the compiler)"
    return ""


@dataclass(frozen=True)
class Packed:
    """Weights ready to serve. `keep` owns what `model` points to."""

    model: binding.ModelStruct
    keep: list[Any]


@dataclass(frozen=True)
class PackedAdapter:
    low_rank: Any
    """[layers + 1, places] in the order of `PLACES`."""
    keep: Packer


class KernelRunner:
    exact, keeps, feeds = True, False, False

    def __init__(
        self,
        model: Skeleton,
        context_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        max_adapters: int = 0,
        library: Any = None,
        levels: int = 0,
    ) -> None:
        """`library`: the one for this machine unless given. `levels`: of quantised weights (`Packer`), 0 for none."""
        assert not refusal(model, dtype, device), "ask `refusal` first"
        self.spec = spec = read_spec(model)
        mixtures = sum(layer.experts for layer in spec.layers)
        self.experts = (mixtures, spec.routing.chosen) if spec.routing else (0, 0)
        self.passes = PassCounts()
        self.path = f"kernels {spec.family}" + (f", int8 of {levels} levels" if levels else "")
        self._library: Any = library or binding.library(dtype=DTYPES[dtype])
        assert self._library is not None
        shared = arithmetic(spec.family, DTYPES[dtype], self._library.headrace_tier().decode())
        self.arithmetic = (
            "" if levels or spec.logit_cap else shared
        )  # no trainer has quantised weights, or caps logits as we do
        self.dtype, self._levels = dtype, levels
        self._convolutions = sum(layer.kernel > 0 for layer in spec.layers)
        self._state = sum(layer.recurrence.state for layer in spec.layers if layer.recurrence)
        self.state_nbytes = self._state * torch.float32.itemsize
        self.block_nbytes = sum(count * each for count, each in self._parts) * dtype.itemsize
        self._tables = _rotary(model, context_length)
        self._query_factors = query_factors(spec, context_length, device)
        self._live: Packed | None = None
        self._adapters: list[PackedAdapter | None] = [None] * max_adapters
        self._low_rank = (binding.LowRank * (max_adapters * (len(spec.layers) + 1) * len(PLACES)))()
        self._logits, self._logits_at = torch.zeros(0, 0), 0
        self._views: dict[int, torch.Tensor] = {}
        self._broken = np.zeros(0, np.int32)
        self._decoder: int | None = None

    @property
    def _parts(self) -> tuple[tuple[int, int], ...]:
        """(layers, elements of one block in one of them): keys and values of attention, and inputs of convolutions."""
        own = [layer for layer in self.spec.layers if layer.attends and layer.borrows is None]
        keys_and_values = Counter(_block_size(layer) for layer in own)
        attention = [(layers, each) for each, layers in keys_and_values.items()]
        return (*attention, (self._convolutions, padded(self.spec.hidden) * BLOCK))

    def _cached(self, index: int) -> int:
        """Numbers of a block in the layers whose keys and values lie before those that a layer reads: they lie by the sizes of their blocks."""
        layers = self.spec.layers
        borrowed = layers[index].borrows
        owner = index if borrowed is None else borrowed
        before = 0
        for count, each in self._parts:
            if each == _block_size(layers[owner]):
                break
            before += count * each
        own = [layer for layer in layers[:owner] if layer.attends and layer.borrows is None]
        return before + sum(_block_size(layer) for layer in own if _block_size(layer) == _block_size(layers[owner]))

    # -- the cache ----------------------------------------------------------------------------------------------------------

    def allocate(self, blocks: int, states: int = 0) -> None:
        shapes = [(layers, blocks, each) for layers, each in self._parts if layers]
        kinds = len(shapes) - bool(self._convolutions)  # keys and values of all sizes lie in one piece
        sizes = [math.prod(shape) for shape in shapes]
        pieces = [*zeros(sum(sizes[:kinds]), self.dtype).split(sizes[:kinds])]
        pieces += [zeros(size, self.dtype) for size in sizes[kinds:]]
        self._cache = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        inputs = self._cache[-1] if self._convolutions else None
        self._states = zeros(states * self._state, torch.float32).view(-1, self._state) if self._state else None
        cache = binding.Cache(
            data=address(self._cache[0]),
            inputs=address(inputs),
            blocks=blocks,
            states=address(self._states),
            state_size=self._state,
        )
        self._decoder = self._library.headrace_open(ctypes.byref(cache), torch.get_num_threads())

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if getattr(self, "_decoder", None) is not None:
            self._library.headrace_close(self._decoder)
            self._decoder = None

    def free(self) -> None:
        self._close()
        self._live, self._cache, self._states = None, [], None
        self._logits, self._logits_at = torch.zeros(0, 0), 0
        self._views.clear()

    def take_out(self, blocks: np.ndarray) -> torch.Tensor:
        content = torch.empty(len(blocks) * sum(layers * each for layers, each in self._parts), dtype=self.dtype)
        for part, room in zip(self._cache, self._split(content, len(blocks)), strict=True):
            torch.index_select(part, 1, torch.from_numpy(blocks), out=room)
        return content

    def put_back(self, blocks: np.ndarray, content: torch.Tensor) -> None:
        for part, mine in zip(self._cache, self._split(content, len(blocks)), strict=True):
            part[:, torch.from_numpy(blocks)] = mine

    def _split(self, content: torch.Tensor, blocks: int) -> list[torch.Tensor]:
        """`content` of some blocks as [layers, blocks, elements] of each part."""
        shapes = [(layers, blocks, each) for layers, each in self._parts if layers]
        flat = content.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            for part in self._cache:
                part[:, other] = part[:, one]

    def copy_state(self, source: int, target: int) -> None:
        assert self._states is not None, "a model without states has none to copy"
        self._states[target] = self._states[source]

    def clear_blocks(self, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            for part in self._cache:
                part[:, block] = 0

    # -- weights ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, tensors: Tensors) -> Packed:
        spec, weights = self.spec, read_weights(self.spec, tensors)
        packer = Packer(self._library, self.dtype, self._levels)
        layers = (binding.LayerStruct * len(spec.layers))()
        for index, (into, layer, part) in enumerate(zip(layers, spec.layers, weights.layers, strict=True)):
            _fill(into, layer, part, packer, _orders(spec, layer))
            into.place = sum(_kind(before) == _kind(layer) for before in spec.layers[:index])
            into.gated, into.head_gated, into.whole_norm = spec.gated, spec.head_gated, spec.qk_norm == "projection"
            if layer.attends:
                into.turned = 2 * self._tables[layer.rotary][0].shape[1]
                into.rotary, into.cached = sorted(self._tables).index(layer.rotary), self._cached(index)
            if spec.values_normed and layer.borrows is None:
                into.v_norm = packer.wide(torch.ones(layer.head_dim))
            if isinstance(part.mlp, Experts):
                assert spec.routing is not None
                routing = spec.routing
                into.experts, into.chosen, into.normalise_chosen = routing.experts, routing.chosen, routing.normalise
                into.sigmoid, into.chosen_scale, into.chosen_least = routing.sigmoid, routing.scale, routing.least
                into.mixture = sum(before.experts for before in spec.layers[:index])
        embed, own = self._embedding(packer, weights.embed), weights.per_layer
        model = binding.ModelStruct(
            layers=len(layers),
            hidden=spec.hidden,
            heads=spec.heads,
            inter=max(layer.dense for layer in spec.layers),
            vocabulary=spec.vocabulary,
            activation=ACTIVATIONS.index("clamped" if spec.clamp else spec.activation),
            mixtures=self.experts[0],
            neighbours=int(spec.neighbours),
            centred=int(spec.centred),
            parallel=int(spec.parallel),
            eps=spec.eps,
            embed_scale=spec.embed_scale,
            residual_scale=spec.residual_scale,
            logit_cap=spec.logit_cap,
            clamp_alpha=spec.clamp.alpha if spec.clamp else 0,
            clamp_limit=spec.clamp.limit if spec.clamp else 0,
            embed=address(embed),
            layer=layers,
            norm=packer.wide(weights.norm),
            head=packer.linear((weights.head, None)),
            query_factors=address(self._query_factors),
            per_layer=spec.per_layer,
        )
        if own is not None:
            model.per_layer_embed = address(self._embedding(packer, own.embed))
            model.per_layer_into, model.per_layer_norm = packer.linear(own.into), packer.wide(own.norm)
        for i, (_, (cos, sin)) in enumerate(sorted(self._tables.items())):
            model.cos[i], model.sin[i] = address(cos), address(sin)
        return Packed(model, [layers, packer])

    def _embedding(self, packer: Packer, weight: torch.Tensor) -> torch.Tensor:
        embed = packer.copy(weight)
        there = [token for token in self.spec.placeholders if token < len(embed)]  # a vocabulary may have been cut
        embed[there] = embed[self.spec.padding].clone()
        return embed

    def use(self, weights: Packed) -> Packed | None:
        replaced, self._live = self._live, weights
        self._library.headrace_use(self._decoder, ctypes.byref(weights.model))
        return replaced

    @torch.no_grad()
    def prepare_adapter(self, spec: AdapterSpec, tensors: Tensors) -> PackedAdapter:
        """Raises ValueError for an adapter of experts, and as `read_adapter` does."""
        adapter = read_adapter(self.spec, spec, tensors=tensors, dtype=self.dtype, device=torch.device("cpu"))
        if any(layer.experts for layer in adapter.layers):
            raise ValueError(
                f"the adapter {spec.name} adapts experts, which the C++ kernels do not serve; start the engine with "
                'engine.path = "fused" where that serves the model, or publish it merged (lora.publish = "merged")'
            )
        packer = Packer(self._library, self.dtype)
        low_rank = (binding.LowRank * ((len(adapter.layers) + 1) * len(PLACES)))()

        def put(place: int, pair: Pair, order: np.ndarray | None = None) -> None:
            a, b = packer.linear((pair.a, None)), packer.linear((pair.b, None), order)
            low_rank[place] = binding.LowRank(a.packed, b.packed, len(pair.a))

        for index, (layer, shape) in enumerate(zip(adapter.layers, self.spec.layers, strict=True)):
            orders = _orders(self.spec, shape)
            for place, name in enumerate(PLACES):
                if pair := layer.linears.get(name):
                    put(index * len(PLACES) + place, pair, orders.get(name))
        if adapter.per_layer is not None:
            put(len(adapter.layers) * len(PLACES), adapter.per_layer)
        return PackedAdapter(low_rank, packer)

    def use_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        self._adapters[slot] = adapter
        size = (len(self.spec.layers) + 1) * len(PLACES)
        for i in range(size):
            self._low_rank[slot * size + i] = adapter.low_rank[i] if adapter else binding.LowRank()

    # -- the pass -----------------------------------------------------------------------------------------------------------

    def forward(self, batch: ForwardInput, stream: torch.Tensor | None = None) -> ForwardOutput:
        """The logits are good until the next pass: their memory is used again.

        `stream` [layers + 1, N, hidden] float32 is filled with the residual stream: embeddings, then the result of each layer."""
        assert self._live is not None, "forward before the first weights"
        wide = [contiguous(array, np.int64) for array in (batch.tokens, batch.rows)]
        narrow = [contiguous(array, np.int32) for array in (batch.starts, batch.context, batch.tables, batch.adapters)]
        assert not self._state or batch.states is not None, "a model with states is told where they are"
        states = None if batch.states is None else contiguous(batch.states, np.int32)
        kept = None if batch.kept is None else contiguous(batch.kept, np.int32)
        self._broken = np.empty(len(batch.tokens), np.int32)
        routing = np.empty((len(batch.tokens), *self.experts), np.uint16) if batch.routing and self.experts[0] else None
        what = binding.PassStruct(
            tokens_count=len(batch.tokens),
            segments=len(batch.context),
            width=batch.tables.shape[1],
            rows_count=len(batch.rows),
            slots=len(self._adapters) if self._adapters and (batch.adapters >= 0).any() else 0,
            tokens=address(wide[0]),
            starts=address(narrow[0]),
            context=address(narrow[1]),
            tables=address(narrow[2]),
            rows=address(wide[1]),
            adapters=address(narrow[3]),
            low_rank=self._low_rank,
            logits=self._room(len(batch.rows)),
            routing=address(routing),
            broken=address(self._broken),
            states=address(states),
            kept=address(kept),
            kept_count=0 if kept is None else len(kept),
            stream=address(stream),
        )
        self._library.headrace_forward(self._decoder, ctypes.byref(what))
        if routing is not None and self.spec.routing and self.spec.routing.experts <= 256:
            routing = routing.astype(np.uint8)
        rows = LogitRows(self._library, self._decoder, self._logits_at, self.spec.vocabulary, self._logits.shape[1])
        return ForwardOutput(self._views[len(batch.rows)], routing, rows.draw, rows.score)

    def _room(self, rows: int) -> int:
        """Address of [rows up to 32, vocabulary up to 32]. The views are kept: to make one costs torch more than it seems."""
        width = padded(self.spec.vocabulary)
        if len(self._logits) < padded(rows):
            self._logits = zeros(padded(rows) * width, torch.float32).view(-1, width)
            self._logits_at = self._logits.data_ptr()
            self._views.clear()
        if rows not in self._views:
            self._views[rows] = self._logits[:rows, : self.spec.vocabulary]
        return self._logits_at

    def blame(self, batch: ForwardInput) -> np.ndarray:
        """Every pass takes notes, so none is run again."""
        assert len(self._broken) == len(batch.tokens), "blame comes right after the pass"
        blamed = self._broken.copy()
        rows = batch.rows[(~self._views[len(batch.rows)].isfinite().all(-1)).numpy()]
        blamed[rows] = np.where(blamed[rows] < 0, len(self.spec.layers), blamed[rows])
        return blamed


def _rotary(model: Skeleton, length: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin [length, D / 2]: the other half is the same."""
    tables = rotary_tables(model, length, torch.device("cpu"))
    assert len(tables) <= 2, "local and global, or with positions and without"

    def half(table: torch.Tensor) -> torch.Tensor:
        return table[:, : table.shape[1] // 2].contiguous()

    return {kind: (half(cos), half(sin)) for kind, (cos, sin) in tables.items()}


def attention_order(spec: Spec) -> np.ndarray:
    """Rows of q with each head's gates behind its queries, k and v, so that all gates follow the values."""
    d, q = spec.head_dim, 2 * spec.heads * spec.head_dim
    queries, gates = np.arange(q, dtype=np.int32).reshape(spec.heads, 2, d).swapaxes(0, 1).reshape(2, -1)
    return np.concatenate([queries, np.arange(q, q + 2 * spec.kv_heads * d, dtype=np.int32), gates])


def delta_order(delta: DeltaRule) -> np.ndarray:
    """Rows that lie by heads of keys, so that all queries come first, then all keys, values, gates, what is taken, and steps."""
    each, values = delta.value_heads // delta.key_heads, delta.values // delta.key_heads
    sizes = [delta.key_width, delta.key_width, values, values]
    first = np.arange(delta.key_heads * sum(sizes), dtype=np.int32).reshape(delta.key_heads, -1)
    rest = np.arange(first.size, first.size + 2 * delta.value_heads, dtype=np.int32).reshape(delta.key_heads, -1)
    parts = [*np.split(first, np.cumsum(sizes)[:-1], 1), *np.split(rest, [each], 1)]
    return np.concatenate([part.ravel() for part in parts])


def state_space_order(space: StateSpace) -> np.ndarray:
    """Rows of gates, values, keys, queries and steps, so that queries come first, then keys, values, gates and steps."""
    rows = np.arange(sum(space.parts), dtype=np.int32)
    gates, values, keys, queries, steps = np.split(rows, np.cumsum(space.parts)[:-1])
    return np.concatenate([queries, keys, values, gates, steps])


Orders = Mapping[str, np.ndarray | None]
"""Rows of a layer's products as the kernels want them; None: as they are."""


def _orders(spec: Spec, layer: LayerSpec) -> Orders:
    orders = {"qkv": _attention_order(spec, layer)}
    if spec.activation != "squared":
        orders["gate_up"] = gate_up_order(layer.dense)
    if isinstance(layer.recurrence, StateSpace):
        orders["into_recurrence"] = state_space_order(layer.recurrence)
    if isinstance(layer.recurrence, DeltaRule) and layer.recurrence.by_key_head:
        orders["into_recurrence"] = delta_order(layer.recurrence)
    return orders


def _attention_order(spec: Spec, layer: LayerSpec) -> np.ndarray | None:
    if layer.same:  # the rows of keys are those of values, too
        rows = np.arange((spec.heads + layer.kv_heads) * layer.head_dim, dtype=np.int32)
        return np.concatenate([rows, rows[spec.heads * layer.head_dim :]])
    return attention_order(spec) if spec.gated and layer.attends else None


def _block_size(layer: LayerSpec) -> int:
    """Numbers of a block of keys and values in one layer."""
    return layer.kv_heads * 2 * padded(layer.head_dim) * BLOCK


def _kind(layer: LayerSpec) -> tuple[bool, bool]:
    return layer.kernel > 0, layer.recurrence is not None


def _fill(into: binding.LayerStruct, spec: LayerSpec, weights: LayerWeights, packer: Packer, orders: Orders) -> None:
    mlp, recurrence = weights.mlp, weights.recurrence
    linears = {"qkv": weights.qkv, "out": weights.out}
    if recurrence is not None:
        linears |= {"into_recurrence": recurrence.into, "out_of_recurrence": recurrence.out}
    if isinstance(mlp, Dense):
        linears |= {"gate_up": mlp.gate_up, "down": mlp.down}
    for name, linear in linears.items():
        if linear is not None:
            setattr(into, name, packer.linear(linear, orders.get(name), weights.factors.get(name)))
    if isinstance(mlp, Experts):
        order = gate_up_order(spec.inner, mlp.alternating) if len(mlp.gate_up[0]) > spec.inner else None
        into.gate_up = packer.experts(mlp.gate_up, mlp.gate_up_bias, order)
        into.down = packer.experts(mlp.down, mlp.down_bias)
        into.router, into.router_bias = packer.wide(mlp.router), packer.wide(mlp.router_bias)
        into.choice_bias = packer.wide(mlp.choice_bias)
        if mlp.shared is not None:
            into.shared_gate_up = packer.linear(mlp.shared.gate_up, orders.get("gate_up"))
            into.shared_down, into.shared_gate = packer.linear(mlp.shared.down), packer.wide(mlp.shared_gate)
    into.input_norm, into.mlp_norm = packer.wide(weights.attention_norm), packer.wide(weights.mlp_norm)
    into.after_attention, into.after_mlp = packer.wide(weights.attention_out_norm), packer.wide(weights.mlp_out_norm)
    into.q_norm, into.k_norm = packer.wide(weights.q_norm), packer.wide(weights.k_norm)
    into.sinks = packer.wide(weights.sinks)
    into.kv_heads, into.head_dim, into.borrows = spec.kv_heads, spec.head_dim, spec.borrows is not None
    into.scale_behind = weights.scale_behind
    if weights.per_layer is not None:
        into.per_layer_gate = packer.linear(weights.per_layer.gate)
        into.per_layer_out = packer.linear(weights.per_layer.out)
        into.after_per_layer = packer.wide(weights.per_layer.norm)
    into.window, into.scale, into.cap, into.kernel = spec.window or 0, spec.scale, spec.cap, spec.kernel
    if weights.convolution is not None:
        into.convolution, into.convolution_bias = (
            packer.wide(weights.convolution.weight),
            packer.wide(weights.convolution.bias),
        )
    if spec.recurrence and recurrence:
        _fill_recurrence(into, spec.recurrence, recurrence, packer)


def _fill_recurrence(into: binding.LayerStruct, spec: Recurrence, weights: RecurrenceWeights, packer: Packer) -> None:
    convolution, bias = weights.convolution.weight, weights.convolution.bias
    if isinstance(spec, StateSpace):
        order = (
            torch.from_numpy(state_space_order(spec)[: spec.convolved]).long() - spec.values
        )  # gates are not convolved
        convolution, bias = convolution[:, order], bias if bias is None else bias[order]
        into.gate_last, (into.shortest_step, into.longest_step) = spec.gate_last, spec.steps
    else:
        into.corrects, into.gate_last, into.shortest_step, into.longest_step = 1, 1, 0, math.inf
    into.kernel = spec.kernel
    into.convolution, into.convolution_bias = packer.wide(convolution), packer.wide(bias)
    into.decay, into.step_bias = packer.wide(weights.decay), packer.wide(weights.step_bias)
    into.result_norm, into.skip = packer.wide(weights.norm), packer.wide(weights.skip)
    into.key_heads, into.value_heads = spec.key_heads, spec.value_heads
    into.key_width, into.value_width = spec.key_width, spec.value_width


# --- The residual stream of one sequence through the kernels
# The residual stream of one sequence through the kernels, to find the layer from which on a trainer computes something else.


Parameters = Iterable[tuple[str, Tensor]]
"""Names and tensors, as a trainer publishes them."""


@dataclass(frozen=True)
class ServedWeights:
    """Weights that a runner is made for, and served with."""

    model_dir: Path
    parameters: Parameters
    dtype: torch.dtype
    """The serving dtype."""
    adapter: tuple[AdapterSpec, Parameters] | None = None

    def runner(self, length: int) -> KernelRunner:
        """A runner for one sequence of `length` tokens; an adapter is in its slot 0."""
        model = skeleton.read(self.model_dir, self.dtype, torch.device("cpu"))
        slots = int(self.adapter is not None)
        runner = KernelRunner(model, length, dtype=self.dtype, device=torch.device("cpu"), max_adapters=slots)
        runner.allocate(-(-length // BLOCK), states=1)
        runner.use(runner.prepare(self._published(self.parameters)))
        if self.adapter is not None:
            spec, tensors = self.adapter
            runner.use_adapter(0, runner.prepare_adapter(spec, self._published(tensors)))
        return runner

    def _published(self, parameters: Parameters) -> dict[str, Tensor]:
        return {name: parameter.detach().to(self.dtype) for name, parameter in parameters}


def residual_stream(weights: ServedWeights, tokens: Sequence[int]) -> tuple[Tensor, int, float]:
    """([layers + 1, T, H] float32: the embeddings, then the result of each layer; the most probable next token; its log-prob)."""
    count = len(tokens)
    runner = weights.runner(count)
    batch = ForwardInput(
        tokens=np.array(tokens, np.int64),
        starts=np.array([0, count], np.int32),
        context=np.zeros(1, np.int32),
        tables=np.arange(-(-count // BLOCK), dtype=np.int32)[None],
        rows=np.array([count - 1], np.int64),
        adapters=np.full(1, 0 if weights.adapter else -1, np.int32),
        states=np.zeros(1, np.int32),
    )
    stream = torch.empty(len(runner.spec.layers) + 1, count, runner.spec.hidden)
    forward = runner.forward(batch, stream)
    token = int(forward.logits[0].argmax())
    scores = score(forward, np.zeros(1, np.int64), np.array([token]))
    return stream, token, float(np.float32(scores.logprobs[0]))
