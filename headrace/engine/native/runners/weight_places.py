"""The parts of a model whose forward pass we write ourselves, and the places of its weights.

A `Spec` says everything that a forward pass must know (`families.py` makes it of a model), and `read_weights` gives it named tensors: the same for every
runner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.engine.native.runners.skeleton import fuse, named_as_part
from headrace.engine.own_families import Clamp, Factors, Names, QueryGrowth, Recurrence, Routing, StateSpace

Tensors = Mapping[str, torch.Tensor]
Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out]."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    window: int | None
    """A token sees itself and the window - 1 tokens before it."""
    scale: float
    """The factor of the attention scores."""
    cap: float
    """Bound of the scores x, which become cap * tanh(x / cap); 0: none."""
    sinks: bool
    """Whether each head has a score that every query sees beside its keys, and that has no value."""
    rotary: str
    """The key of the rotary table that the layer uses, `UNTURNED` where it has no positions."""
    inner: int
    """Width of the feed-forward part, of one expert's in a mixture."""
    experts: bool
    shared: int = 0
    """Width of the expert of a mixture that serves every token; 0: there is none."""
    kernel: int = 0
    """Tokens of a gated short convolution, which the layer has in the place of attention; 0 for others."""
    kv_heads: int = 1
    head_dim: int = 0
    borrows: int | None = None
    """The layer whose keys and values it reads, where it has none."""
    same: bool = False
    """Whether values are what keys are before their norm and their positions."""
    attends: bool = True
    recurrence: Recurrence | None = None
    """The recurrence that the layer has in the place of attention, or beside it."""

    @property
    def dense(self) -> int:
        """Width of the feed-forward part that serves every token; 0: there is none."""
        return self.shared if self.experts else self.inner


@dataclass(frozen=True, kw_only=True)
class Spec:
    family: str
    names: Names
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    eps: float
    activation: Literal["silu", "gelu_tanh", "squared"]
    """`squared`: the square of what is positive, where up has no gate beside it."""
    biased: frozenset[str]
    """Modules of layers that have biases wherever they are."""
    expert_bias: bool
    """Whether experts and their router have biases."""
    choice_bias: bool
    """Whether experts are chosen with a bias beside their weights."""
    shared_gate: bool
    """Whether the expert that serves every token has a factor of its own for each."""
    per_layer: int
    """Width of the embedding that each layer has of its own; 0: there is none."""
    scaled_behind: bool
    """Whether the residual stream has a factor behind each layer."""
    values_normed: bool
    tied: bool
    """The head is the embedding."""
    qk_norm: Literal["", "head", "projection"]
    """RMSNorm of queries and keys: none, over each head, over all heads at once (OLMo)."""
    norms: frozenset[str]
    """Norms that a layer has: `before_attention` or the other three of `Names`."""
    norm_offset: float
    centred: bool
    parallel: bool
    gated: bool
    head_gated: bool
    """Whether what each head gives has a factor of its own."""
    neighbours: bool
    embed_scale: float
    residual_scale: float
    logit_scale: float
    """Factor of the logits."""
    placeholders: tuple[int, ...]
    """Tokens whose embeddings are that of `padding`."""
    padding: int
    logit_cap: float
    """Bound of the logits, as `LayerSpec.cap` is that of scores."""
    grows: QueryGrowth | None
    clamp: Clamp | None
    """Most facts from `norm_offset` on are those of `OwnFamily`."""
    routing: Routing | None
    factors: Mapping[str, Factors]


@dataclass(frozen=True)
class Dense:
    gate_up: Linear
    """Rows of the gate, if there is one, then those of up."""
    down: Linear


@dataclass(frozen=True, kw_only=True)
class Experts:
    router: torch.Tensor
    """[E, H] float32"""
    gate_up: torch.Tensor
    """[E, 2 * inner, H], or without a gate [E, inner, H]"""
    down: torch.Tensor
    """[E, H, inner]"""
    router_bias: torch.Tensor | None
    """[E] float32"""
    gate_up_bias: torch.Tensor | None
    """[E, 2 * inner]"""
    down_bias: torch.Tensor | None
    """[E, H]"""
    alternating: bool
    """Whether rows of gate and up follow each other in turns, and not all those of the gate first."""
    choice_bias: torch.Tensor | None
    """[E] float32: added to weights where experts are chosen by them."""
    shared: Dense | None
    """The expert that serves every token."""
    shared_gate: torch.Tensor | None
    """[H] float32: the product with it is, after a sigmoid, the factor of that expert; None: 1."""


@dataclass(frozen=True)
class Convolution:
    weight: torch.Tensor
    """[tokens, C] float32, the current token last."""
    bias: torch.Tensor | None
    """[C]"""


@dataclass(frozen=True, kw_only=True)
class RecurrenceWeights:
    """Weights of a layer with a recurrence beside its products, in float32."""

    convolution: Convolution
    """Over the numbers of `Recurrence.convolved`, in the order of the product's rows."""
    decay: torch.Tensor
    """[value heads]: a state fades by exp(-decay * step)."""
    step_bias: torch.Tensor
    """[value heads]"""
    norm: torch.Tensor | None
    """[`Recurrence.normed`]"""
    skip: torch.Tensor | None
    """[value heads]"""
    into: Linear
    """Rows of `Recurrence.rows`."""
    out: Linear


@dataclass(frozen=True)
class PerLayer:
    """The vector that a layer makes of the embedding of its own."""

    gate: Linear
    out: Linear
    norm: torch.Tensor
    """[H] float32: of what is added."""


@dataclass(frozen=True)
class PerLayerEmbeddings:
    embed: torch.Tensor
    """[V, layers * width]"""
    into: Linear
    """The part of a token's embedding that is added to them."""
    norm: torch.Tensor
    """[width] float32"""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of norms are float32 with the offset added; the others are views into the update where that is possible."""

    attention_norm: torch.Tensor | None
    qkv: Linear | None
    """Rows of q, then k, then v, where it is `gated` each head's gates behind its queries, and where it is `head_gated` one for each head; of a convolution the factor of its input, that of its result,
    and its input. None where a recurrence is alone."""
    convolution: Convolution | None
    recurrence: RecurrenceWeights | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    """[Hq] float32"""
    out: Linear | None
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Dense | Experts | None
    mlp_out_norm: torch.Tensor | None
    per_layer: PerLayer | None
    scale_behind: float
    factors: Mapping[str, torch.Tensor]
    """[out] float32: those of the outputs of products, which their biases have in them already."""


@dataclass(frozen=True)
class Weights:
    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    """The scale of the logits is in it."""
    head: torch.Tensor
    per_layer: PerLayerEmbeddings | None


# --- where its weights are ---------------------------------------------------------------------------------------------


def expected_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Every parameter of such a model by its canonical name."""
    shapes = {
        f"{spec.names.embed}.weight": (spec.vocabulary, spec.hidden),
        f"{spec.names.norm}.weight": (spec.hidden,),
    }
    if spec.per_layer:
        all_of_them = len(spec.layers) * spec.per_layer
        shapes[f"{spec.names.per_layer_embed}.weight"] = (spec.vocabulary, all_of_them)
        shapes[f"{spec.names.per_layer_into}.weight"] = (all_of_them, spec.hidden)
        shapes[f"{spec.names.per_layer_norm}.weight"] = (spec.per_layer,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocabulary, spec.hidden)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(spec, layer).items()}
    return shapes


def products(spec: Spec, layer: LayerSpec) -> dict[str, tuple[str, ...]]:
    """The layer's products, experts aside, by the modules that each contains."""
    names = spec.names
    gates = (names.head_gate,) if spec.head_gated else ()
    attention: dict[str, tuple[str, ...]] = {}
    if layer.attends:
        attention = {"qkv": (*names.qkv[: _parts(layer)], *gates), "out": (names.out,)}
    if layer.kernel:
        attention = {"qkv": (names.into_convolution,), "out": (names.out_of_convolution,)}
    if layer.recurrence:
        attention |= {"into_recurrence": names.into_recurrence, "out_of_recurrence": (names.out_of_recurrence,)}
    if spec.per_layer:
        attention |= {"per_layer_gate": (names.per_layer_gate,), "per_layer_out": (names.per_layer_out,)}
    if layer.experts:
        shared = {"gate_up": names.shared_gate_up, "down": (names.shared_down,)}
        return attention | shared if layer.shared else attention
    return attention | {"gate_up": names.gate_up, "down": (names.down,)} if layer.inner else attention


def _parts(layer: LayerSpec) -> int:
    """How many of queries, keys and values have rows of their own."""
    return 1 if layer.borrows is not None else 2 if layer.same else 3


def _gates(spec: Spec) -> int:
    """How many matrices the first product of a feed-forward part has: gate and up, or up alone."""
    return 1 if spec.activation == "squared" else 2


def linear_shapes(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """The layer's linear modules, experts aside: (out, in) by the name within the layer."""
    q, kv = spec.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    first: tuple[int, ...] = (2 * q if spec.gated else q, kv, kv)[: _parts(layer)]
    if spec.head_gated:
        first = (*first, spec.heads)
    if layer.kernel:
        q, first = spec.hidden, (spec.hidden,) * 3
    outputs = {"qkv": first, "out": (spec.hidden,), "gate_up": (layer.dense,) * _gates(spec), "down": (spec.hidden,)}
    outputs |= {"per_layer_gate": (spec.per_layer,), "per_layer_out": (spec.hidden,)}
    inputs = {"qkv": spec.hidden, "out": q, "gate_up": spec.hidden, "down": layer.dense}
    inputs |= {"per_layer_gate": spec.hidden, "per_layer_out": spec.per_layer}
    if layer.recurrence:
        outputs |= {"into_recurrence": layer.recurrence.rows, "out_of_recurrence": (spec.hidden,)}
        inputs |= {"into_recurrence": spec.hidden, "out_of_recurrence": layer.recurrence.values}
    shapes: dict[str, tuple[int, int]] = {}
    for product, modules in products(spec, layer).items():
        rows = outputs[product] if len(modules) > 1 else (sum(outputs[product]),)
        shapes |= {module: (out, inputs[product]) for module, out in zip(modules, rows, strict=True)}
    return shapes


def expert_shapes(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, int, int]]:
    """(experts, out, in) of the layer's stacked experts; empty for a dense layer."""
    if not layer.experts:
        return {}
    assert spec.routing is not None, "experts need a router"
    return {
        f"{spec.names.experts}.{spec.names.experts_in}": (
            spec.routing.experts,
            _gates(spec) * layer.inner,
            spec.hidden,
        ),
        f"{spec.names.experts}.down_proj": (spec.routing.experts, spec.hidden, layer.inner),
    }


def _stored_experts(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    """The parameters of the layer's experts and of their router."""
    shapes, stored = expert_shapes(spec, layer), dict[str, tuple[int, ...]]()
    for name, (experts, out, into) in shapes.items():
        assert spec.routing is not None
        stored[name] = (experts, into, out) if spec.routing.transposed else (experts, out, into)
        stored[f"{spec.names.router}.weight"] = (experts, spec.hidden)
        if spec.expert_bias:
            stored[f"{name}_bias"], stored[f"{spec.names.router}.bias"] = (experts, out), (experts,)
    return stored


def _layer_shapes(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in linear_shapes(spec, layer).items():
        shapes[f"{name}.weight"] = shape
        if name in spec.biased:
            shapes[f"{name}.bias"] = shape[:1]
    shapes |= _stored_experts(spec, layer)
    if layer.experts and spec.choice_bias and spec.routing:
        shapes[spec.names.choice_bias] = (spec.routing.experts,)
    if layer.shared and spec.shared_gate:
        shapes[f"{spec.names.shared_gate}.weight"] = (1, spec.hidden)
    if layer.sinks:
        shapes[spec.names.sinks] = (spec.heads,)
    shapes |= {f"{getattr(spec.names, which)}.weight": (spec.hidden,) for which in spec.norms}
    if spec.per_layer:
        shapes[f"{spec.names.behind_per_layer}.weight"] = (spec.hidden,)
    if spec.scaled_behind:
        shapes[spec.names.scale_behind] = (1,)
    if layer.kernel:
        shapes[f"{spec.names.convolution}.weight"] = (spec.hidden, 1, layer.kernel)
        if spec.names.convolution in spec.biased:
            shapes[f"{spec.names.convolution}.bias"] = (spec.hidden,)
    if layer.recurrence:
        shapes |= _recurrence_shapes(spec, layer.recurrence)
    if layer.attends and spec.qk_norm:
        whole = spec.qk_norm == "projection"
        normed = ((spec.names.q_norm, spec.heads), (spec.names.k_norm, layer.kv_heads))
        for name, heads in normed[: 1 if layer.borrows is not None else 2]:
            shapes[f"{name}.weight"] = (layer.head_dim * heads if whole else layer.head_dim,)
    return shapes


def _recurrence_shapes(spec: Spec, of: Recurrence) -> dict[str, tuple[int, ...]]:
    names, convolution = spec.names, spec.names.recurrence_convolution
    shapes: dict[str, tuple[int, ...]] = {f"{convolution}.weight": (of.convolved, 1, of.kernel)}
    if of.normed:
        shapes[f"{names.recurrence_norm}.weight"] = (of.normed,)
    if convolution in spec.biased:
        shapes[f"{convolution}.bias"] = (of.convolved,)
    return shapes | {name: (of.value_heads,) for name in (names.decay, names.step_bias, names.skip) if name}


def _row_factors(spec: Spec, layer: LayerSpec) -> dict[str, torch.Tensor]:
    """Factors of each output of the layer's products, those of its inputs aside."""
    shapes, of = linear_shapes(spec, layer), layer.recurrence
    found = {}
    for name in products(spec, layer).keys() & spec.factors.keys():
        sizes = [shapes[module][0] for module in products(spec, layer)[name]]
        if name == "into_recurrence" and isinstance(of, StateSpace):
            sizes = list(of.parts)
        found[name] = torch.tensor(spec.factors[name].rows).repeat_interleave(torch.tensor(sizes))
    return found


def read_weights(spec: Spec, tensors: Tensors) -> Weights:
    """`tensors`: every parameter by its canonical name, shapes checked; those of other parts than the language part are not read."""
    tensors = named_as_part(tensors)
    embed = tensors[f"{spec.names.embed}.weight"]
    layers = [_layer_weights(spec, layer, _Layer(tensors, index)) for index, layer in enumerate(spec.layers)]
    norm = (tensors[f"{spec.names.norm}.weight"].float() + spec.norm_offset) * spec.logit_scale
    return Weights(embed, layers, norm, embed if spec.tied else tensors["lm_head.weight"], _per_layer(spec, tensors))


def _per_layer(spec: Spec, tensors: Tensors) -> PerLayerEmbeddings | None:
    if not spec.per_layer:
        return None
    names = spec.names
    embed, into, norm = (
        tensors[f"{name}.weight"] for name in (names.per_layer_embed, names.per_layer_into, names.per_layer_norm)
    )
    return PerLayerEmbeddings(embed, (into, None), norm.float() + spec.norm_offset)


@dataclass(frozen=True)
class _Layer:
    """The tensors of one layer."""

    tensors: Tensors
    index: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[f"model.layers.{self.index}.{name}"]

    def linear(self, names: Sequence[str], biased: frozenset[str], by: torch.Tensor | None = None) -> Linear:
        """Several matrices over one input as one. `biased`: those that have a bias; others of the same product get zeros. `by`: factors of their biases."""
        weights = [self[f"{name}.weight"] for name in names]
        if biased.isdisjoint(names):
            return fuse(weights), None
        biases = [
            self[f"{name}.bias"] if name in biased else weight.new_zeros(len(weight))
            for name, weight in zip(names, weights, strict=True)
        ]
        return fuse(weights), fuse(biases) if by is None else fuse(biases).float() * by


def _layer_weights(spec: Spec, layer: LayerSpec, tensors: _Layer) -> LayerWeights:
    def norm(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].float() + spec.norm_offset

    def of(which: str) -> torch.Tensor | None:
        return norm(getattr(spec.names, which)) if which in spec.norms else None

    inside, normed, by = products(spec, layer), spec.qk_norm and layer.attends, _row_factors(spec, layer)

    def linear(product: str) -> Linear | None:
        return tensors.linear(inside[product], spec.biased, by.get(product)) if product in inside else None

    return LayerWeights(
        attention_norm=of("before_attention"),
        qkv=linear("qkv"),
        convolution=_convolution(spec, tensors, spec.names.convolution) if layer.kernel else None,
        recurrence=_recurrence(spec, layer, tensors, by) if layer.recurrence else None,
        q_norm=norm(spec.names.q_norm) if normed else None,
        k_norm=norm(spec.names.k_norm) if normed and layer.borrows is None else None,
        sinks=tensors[spec.names.sinks].float() if layer.sinks else None,
        out=linear("out"),
        attention_out_norm=of("behind_attention"),
        mlp_norm=of("before_mlp"),
        mlp=_mlp(spec, layer, tensors, by) if layer.inner else None,
        mlp_out_norm=of("behind_mlp"),
        per_layer=PerLayer(
            tensors.linear(inside["per_layer_gate"], spec.biased),
            tensors.linear(inside["per_layer_out"], spec.biased),
            norm(spec.names.behind_per_layer),
        )
        if spec.per_layer
        else None,
        scale_behind=float(tensors[spec.names.scale_behind]) if spec.scaled_behind else 1.0,
        factors={name: rows * spec.factors[name].into for name, rows in by.items()},
    )


def _convolution(spec: Spec, tensors: _Layer, name: str) -> Convolution:
    weight = tensors[f"{name}.weight"].float()[:, 0].T.contiguous()
    return Convolution(weight, tensors[f"{name}.bias"].float() if name in spec.biased else None)


def _recurrence(spec: Spec, layer: LayerSpec, tensors: _Layer, by: Mapping[str, torch.Tensor]) -> RecurrenceWeights:
    names, plain = spec.names, not (layer.recurrence and layer.recurrence.normed)
    return RecurrenceWeights(
        convolution=_convolution(spec, tensors, names.recurrence_convolution),
        decay=tensors[names.decay].float().exp(),
        step_bias=tensors[names.step_bias].float(),
        norm=None if plain else tensors[f"{names.recurrence_norm}.weight"].float(),
        skip=tensors[names.skip].float() if names.skip else None,
        into=tensors.linear(names.into_recurrence, spec.biased, by.get("into_recurrence")),
        out=tensors.linear((names.out_of_recurrence,), spec.biased, by.get("out_of_recurrence")),
    )


def _mlp(spec: Spec, layer: LayerSpec, tensors: _Layer, by: Mapping[str, torch.Tensor]) -> Dense | Experts:
    names = spec.names
    if layer.experts:
        assert spec.routing is not None
        gate_up, down = (tensors[f"{names.experts}.{which}"] for which in (names.experts_in, "down_proj"))
        turned = spec.routing.transposed
        return Experts(
            router=tensors[f"{names.router}.weight"].float(),
            gate_up=gate_up.mT if turned else gate_up,
            down=down.mT if turned else down,
            router_bias=tensors[f"{names.router}.bias"].float() if spec.expert_bias else None,
            gate_up_bias=tensors[f"{names.experts}.{names.experts_in}_bias"] if spec.expert_bias else None,
            down_bias=tensors[f"{names.experts}.down_proj_bias"] if spec.expert_bias else None,
            alternating=turned,
            choice_bias=tensors[names.choice_bias].float() if spec.choice_bias else None,
            shared=_dense(spec, layer, tensors, by) if layer.shared else None,
            shared_gate=tensors[f"{names.shared_gate}.weight"].float()[0]
            if layer.shared and spec.shared_gate
            else None,
        )
    return _dense(spec, layer, tensors, by)


def _dense(spec: Spec, layer: LayerSpec, tensors: _Layer, by: Mapping[str, torch.Tensor]) -> Dense:
    inside = products(spec, layer)
    return Dense(*(tensors.linear(inside[name], spec.biased, by.get(name)) for name in ("gate_up", "down")))
