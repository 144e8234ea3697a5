"""The model families whose forward pass we write ourselves: the parts of a model, and the places of its weights.

A `Spec` says everything that a forward pass must know, `read_weights` gives it named tensors: the same for every runner.
Flags are not trusted: biases, norms and experts exist if the model has parameters for them, and windows and scales are those
that its attention used in the dry run. What neither shows is a fact of the family (`engine/own_families.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.engine.native.runners.skeleton import Skeleton, fuse, named_as_part
from headrace.engine.own_families import FAMILIES, OWN_FAMILIES, Clamp, Names, QueryGrowth, Recurrence, Routing

Tensors = Mapping[str, torch.Tensor]
Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out]."""

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Angles that depend on the position alone. `dynamic` and `longrope` look at the longest sequence of the batch: they are fixed up to a length."""


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
    recurrence: Recurrence | None = None
    """The recurrence that the layer has in the place of attention."""

    @property
    def dense(self) -> int:
        """Width of the feed-forward part that serves every token; 0: there is none."""
        return self.shared if self.experts else self.inner

    @property
    def attends(self) -> bool:
        return not self.kernel and self.recurrence is None


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
    activation: Literal["silu", "gelu_tanh"]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    conv_bias: bool
    """Whether convolutions have biases, and with them the products of those that are gated."""
    recurrence_bias: bool
    """Whether products of recurrences have biases."""
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
    """The eleven facts up to here are those of `OwnFamily`."""
    routing: Routing | None


@dataclass(frozen=True)
class Dense:
    gate_up: Linear
    """Rows of the gate, then those of up."""
    down: Linear


@dataclass(frozen=True, kw_only=True)
class Experts:
    router: torch.Tensor
    """[E, H] float32"""
    gate_up: torch.Tensor
    """[E, 2 * inner, H]"""
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
    norm: torch.Tensor
    """[`Recurrence.normed`]"""
    skip: torch.Tensor | None
    """[value heads]"""


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
    qkv: Linear
    """Rows of q, then k, then v, and where it is `gated` each head's gates behind its queries; of a convolution the factor of its input, that of its result,
    and its input; of a recurrence its parts (`Recurrence.rows`)."""
    convolution: Convolution | None
    recurrence: RecurrenceWeights | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    """[Hq] float32"""
    out: Linear
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Dense | Experts
    mlp_out_norm: torch.Tensor | None
    per_layer: PerLayer | None
    scale_behind: float


@dataclass(frozen=True)
class Weights:
    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    """The scale of the logits is in it."""
    head: torch.Tensor
    per_layer: PerLayerEmbeddings | None


# --- what the model is -------------------------------------------------------------------------------------------------


def refusal(skeleton: Skeleton) -> str:
    """Empty if a `Spec` can describe the model to the last parameter; else the reason why not, a whole clause."""
    skeleton = skeleton.language or skeleton
    config = skeleton.config
    if config.model_type not in OWN_FAMILIES:
        return f"{config.model_type} is none of the families that have a decoder of ours ({', '.join(OWN_FAMILIES)})"
    family = FAMILIES[config.model_type]
    layers = [
        layer
        for layer in range(config.num_hidden_layers)
        if not family.convolves(config, layer) and family.recurrence(config, layer) is None
    ]
    if skeleton.attention is None or list(skeleton.attention.layers) != layers:
        return skeleton.objection
    if reason := family.lacks(config):
        return reason
    if _activation(config) not in _ACTIVATIONS:
        return f"its activation is {_activation(config)}, and ours are {' and '.join(_ACTIVATIONS)}"
    if getattr(config, "clip_qkv", None):
        return "its config sets clip_qkv"
    for parameters in _rope_parameters(config):
        if reason := _rope_refusal(parameters, skeleton):
            return reason
    expected = expected_shapes(read_spec(skeleton))
    if expected != skeleton.shapes:
        odd = next(name for name in (*expected, *skeleton.shapes) if expected.get(name) != skeleton.shapes.get(name))
        return f"its parameter {odd} has a shape or a place that the family does not have"
    return ""


def _rope_refusal(parameters: Mapping[str, Any], skeleton: Skeleton) -> str:
    kind, length = parameters.get("rope_type"), skeleton.context_length or math.inf
    if kind in _ROPE:
        return ""
    config = {**vars(skeleton.config), **parameters}
    longest = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}.get(str(kind), "")
    if longest and length <= (most := config.get(longest, 0)):
        return ""
    known = f"fixed up to {longest} = {most} alone" if longest else f"and ours are {', '.join(_ROPE)}"
    return f"its rotary positions are of type {kind}, {known}"


def serves(skeleton: Skeleton) -> bool:
    """Whether a `Spec` can describe the model to the last parameter. Other models use Hugging Face's forward."""
    return not refusal(skeleton)


def mixes(skeleton: Skeleton) -> bool:
    """Whether the model is a known mixture of experts."""
    return serves(skeleton) and FAMILIES[skeleton.model_type].routing(skeleton.config) is not None


def read_spec(skeleton: Skeleton) -> Spec:
    skeleton = skeleton.language or skeleton
    config, shapes, geometry = skeleton.config, skeleton.shapes, skeleton.geometry
    family = FAMILIES[config.model_type]
    names, first = family.names, f"model.layers.{skeleton.attention.layers[0] if skeleton.attention else 0}."
    norm = shapes.get(f"{first}{names.q_norm}.weight")
    return Spec(
        family=config.model_type,
        names=names,
        layers=tuple(_layer_spec(skeleton, index) for index in range(config.num_hidden_layers)),
        heads=config.num_attention_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        hidden=config.hidden_size,
        vocabulary=skeleton.vocabulary,
        eps=next(filter(None, (getattr(config, name, None) for name in _EPS))),
        activation="gelu_tanh" if _activation(config) == "gelu_pytorch_tanh" else "silu",
        qkv_bias=f"{first}{names.qkv[0]}.bias" in shapes,
        out_bias=f"{first}{names.out}.bias" in shapes,
        mlp_bias=f"{first}{names.gate_up[0]}.bias" in shapes,
        conv_bias=any(name.endswith(f".{names.convolution}.bias") for name in shapes)
        or any(name.endswith(f".{names.recurrence_convolution}.bias") for name in shapes),
        recurrence_bias=any(name.endswith(f".{names.out_of_recurrence}.bias") for name in shapes),
        expert_bias=any(name.endswith(f".{names.router}.bias") for name in shapes),
        choice_bias=any(name.endswith(f".{names.choice_bias}") for name in shapes),
        shared_gate=any(name.endswith(f".{names.shared_gate}.weight") for name in shapes),
        per_layer=shapes.get(f"{names.per_layer_norm}.weight", (0,))[0],
        scaled_behind=f"model.layers.0.{names.scale_behind}" in shapes,
        values_normed=family.values_normed,
        tied="lm_head.weight" not in shapes,
        qk_norm="" if norm is None else "head" if norm == (geometry.head_dim,) else "projection",
        norms=frozenset(which for which in NORMS if f"{first}{getattr(names, which)}.weight" in shapes),
        norm_offset=family.norm_offset,
        centred=family.centred,
        parallel=family.parallel,
        gated=family.gated,
        neighbours=family.neighbours,
        embed_scale=family.embed_scale(config),
        residual_scale=family.residual_scale(config),
        logit_scale=family.logit_scale(config),
        placeholders=skeleton.placeholders,
        padding=getattr(config, "pad_token_id", None) or 0,
        logit_cap=family.logit_cap(config),
        grows=family.grows(config),
        clamp=family.clamp(config),
        routing=family.routing(config),
    )


_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_eps")
NORMS = ("before_attention", "behind_attention", "before_mlp", "behind_mlp")


def _layer_spec(skeleton: Skeleton, index: int) -> LayerSpec:
    config, family = skeleton.config, FAMILIES[skeleton.model_type]
    shapes, prefix = skeleton.shapes, f"model.layers.{index}."
    experts = shapes.get(f"{prefix}{family.names.experts}.down_proj")
    routing = family.routing(config)
    if experts and routing and routing.transposed:
        experts = experts[0], experts[2], experts[1]
    down = experts or shapes.get(f"{prefix}{family.names.down}.weight", (0,))
    kind = config.layer_types[index] if _by_kind(config) else ""
    kv_heads, head_dim = skeleton.heads[index]
    return LayerSpec(
        window=skeleton.windows[index],
        scale=skeleton.scales[index],
        cap=skeleton.caps[index],
        sinks=skeleton.sinks[index],
        rotary=kind if family.turned(config, index) else UNTURNED,
        inner=down[-1],
        experts=experts is not None,
        shared=shapes.get(f"{prefix}{family.names.shared_down}.weight", (0,))[-1] if experts else 0,
        kernel=shapes.get(f"{prefix}{family.names.convolution}.weight", (0,))[-1],
        kv_heads=kv_heads or skeleton.geometry.kv_heads,
        head_dim=head_dim or skeleton.geometry.head_dim,
        borrows=_borrows(skeleton, index) if kv_heads else None,
        same=kv_heads > 0 and _lacks(skeleton, index, -1) and not _lacks(skeleton, index, 1),
        recurrence=family.recurrence(config, index),
    )


def _lacks(skeleton: Skeleton, layer: int, part: int) -> bool:
    """Whether a layer has no module for its queries (0), keys (1) or values (-1)."""
    names = FAMILIES[skeleton.model_type].names.qkv
    return len(names) > 1 and f"model.layers.{layer}.{names[part]}.weight" not in skeleton.shapes


def _borrows(skeleton: Skeleton, index: int) -> int | None:
    """The last layer before of the same kind that has keys, for one that has none (Gemma 3n)."""
    kinds = getattr(skeleton.config, "layer_types", None)
    if kinds is None or not _lacks(skeleton, index, 1):
        return None
    owners = (layer for layer in range(index) if kinds[layer] == kinds[index] and not _lacks(skeleton, layer, 1))
    return max(owners, default=None)


def _activation(config: Any) -> str:
    named = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return named or FAMILIES[config.model_type].activation


def _by_kind(config: Any) -> bool:
    """Whether rotary positions are others in layers of other kinds (Gemma 3)."""
    return "rope_type" not in config.rope_parameters


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One a kind of layer where these differ, else one."""
    parameters = config.rope_parameters
    return [parameters[kind] for kind in set(config.layer_types)] if _by_kind(config) else [parameters]


UNTURNED = "none"
"""The key of a rotary table that leaves all as it is."""


def rotary_tables(
    skeleton: Skeleton, length: int, device: torch.device
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns cos and sin [length, D] float32 for every kind of layer, computed by the model's own module. D is less than a head where a part of it
    has no positions."""
    family, config = FAMILIES[skeleton.model_type], skeleton.config
    rotary = getattr((skeleton.language or skeleton).model.model, family.names.rotary)
    kinds = [] if rotary is None else sorted(set(config.layer_types)) if _by_kind(config) else [""]
    positions, like = torch.arange(length, device=device)[None], torch.empty(0, device=device)
    made = {kind: rotary(like, positions, *([kind] if kind else [])) for kind in kinds}
    tables = {kind: (_twice(cos[0], family.angles), _twice(sin[0], family.angles)) for kind, (cos, sin) in made.items()}
    turned = family.turned
    if not all(turned(config, layer) for layer in range(config.num_hidden_layers)):
        like = (
            next(iter(tables.values()))[0] if tables else torch.empty(length, skeleton.geometry.head_dim, device=device)
        )
        tables[UNTURNED] = torch.ones_like(like), torch.zeros_like(like)
    return tables


def _twice(table: torch.Tensor, angles: str) -> torch.Tensor:
    """A table of all angles, and then of all once more."""
    return table if angles == "twice" else torch.cat([table[:, :: 2 if angles == "in pairs" else 1]] * 2, -1)


def query_factors(spec: Spec, length: int, device: torch.device) -> torch.Tensor | None:
    """[length] float32: what queries at each position are multiplied by; None where they do not grow."""
    if spec.grows is None:
        return None
    return 1 + spec.grows.beta * torch.log(1 + torch.floor(torch.arange(length, device=device) / spec.grows.length))


# --- where its weights are ---------------------------------------------------------------------------------------------


def expected_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Every parameter of such a model by its canonical name."""
    shapes = {
        "model.embed_tokens.weight": (spec.vocabulary, spec.hidden),
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
    attention = {"qkv": names.qkv[: _parts(layer)], "out": (names.out,)}
    if layer.kernel:
        attention = {"qkv": (names.into_convolution,), "out": (names.out_of_convolution,)}
    if layer.recurrence:
        attention = {"qkv": names.into_recurrence, "out": (names.out_of_recurrence,)}
    if spec.per_layer:
        attention |= {"per_layer_gate": (names.per_layer_gate,), "per_layer_out": (names.per_layer_out,)}
    if layer.experts:
        shared = {"gate_up": names.shared_gate_up, "down": (names.shared_down,)}
        return attention | shared if layer.shared else attention
    return attention | {"gate_up": names.gate_up, "down": (names.down,)}


def _parts(layer: LayerSpec) -> int:
    """How many of queries, keys and values have rows of their own."""
    return 1 if layer.borrows is not None else 2 if layer.same else 3


def linear_shapes(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """The layer's linear modules, experts aside: (out, in) by the name within the layer."""
    q, kv = spec.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    first: tuple[int, ...] = (2 * q if spec.gated else q, kv, kv)[: _parts(layer)]
    if layer.kernel:
        q, first = spec.hidden, (spec.hidden,) * 3
    if layer.recurrence:
        q, first = layer.recurrence.values, layer.recurrence.rows
    outputs = {"qkv": first, "out": (spec.hidden,), "gate_up": (layer.dense, layer.dense), "down": (spec.hidden,)}
    outputs |= {"per_layer_gate": (spec.per_layer,), "per_layer_out": (spec.hidden,)}
    inputs = {"qkv": spec.hidden, "out": q, "gate_up": spec.hidden, "down": layer.dense}
    inputs |= {"per_layer_gate": spec.hidden, "per_layer_out": spec.per_layer}
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
        f"{spec.names.experts}.gate_up_proj": (spec.routing.experts, 2 * layer.inner, spec.hidden),
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
        if _has_bias(spec, name):
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
        if spec.conv_bias:
            shapes[f"{spec.names.convolution}.bias"] = (spec.hidden,)
    elif layer.recurrence:
        shapes |= _recurrence_shapes(spec, layer.recurrence)
    elif spec.qk_norm:
        whole = spec.qk_norm == "projection"
        normed = ((spec.names.q_norm, spec.heads), (spec.names.k_norm, layer.kv_heads))
        for name, heads in normed[: 1 if layer.borrows is not None else 2]:
            shapes[f"{name}.weight"] = (layer.head_dim * heads if whole else layer.head_dim,)
    return shapes


def _recurrence_shapes(spec: Spec, of: Recurrence) -> dict[str, tuple[int, ...]]:
    names, convolution = spec.names, spec.names.recurrence_convolution
    shapes: dict[str, tuple[int, ...]] = {
        f"{convolution}.weight": (of.convolved, 1, of.kernel),
        f"{names.recurrence_norm}.weight": (of.normed,),
    }
    if spec.conv_bias:
        shapes[f"{convolution}.bias"] = (of.convolved,)
    return shapes | {name: (of.value_heads,) for name in (names.decay, names.step_bias, names.skip) if name}


def _has_bias(spec: Spec, name: str) -> bool:
    if name in (spec.names.into_convolution, spec.names.out_of_convolution):
        return spec.conv_bias
    if name in (*spec.names.into_recurrence, spec.names.out_of_recurrence):
        return spec.recurrence_bias
    if name in (spec.names.per_layer_gate, spec.names.per_layer_out):
        return False
    if name in spec.names.qkv:
        return spec.qkv_bias
    return spec.out_bias if name == spec.names.out else spec.mlp_bias


def read_weights(spec: Spec, tensors: Tensors) -> Weights:
    """`tensors`: every parameter by its canonical name, shapes checked; those of other parts than the language part are not read."""
    tensors = named_as_part(tensors)
    embed = tensors["model.embed_tokens.weight"]
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

    def linear(self, names: Sequence[str], bias: bool) -> Linear:
        """Several matrices over one input as one."""
        weight = fuse([self[f"{name}.weight"] for name in names])
        return weight, fuse([self[f"{name}.bias"] for name in names]) if bias else None


def _layer_weights(spec: Spec, layer: LayerSpec, tensors: _Layer) -> LayerWeights:
    def norm(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].float() + spec.norm_offset

    def of(which: str) -> torch.Tensor | None:
        return norm(getattr(spec.names, which)) if which in spec.norms else None

    inside, normed = products(spec, layer), spec.qk_norm and layer.attends
    return LayerWeights(
        attention_norm=of("before_attention"),
        qkv=tensors.linear(inside["qkv"], _has_bias(spec, inside["qkv"][0])),
        convolution=_convolution(spec, tensors, spec.names.convolution) if layer.kernel else None,
        recurrence=_recurrence(spec, tensors) if layer.recurrence else None,
        q_norm=norm(spec.names.q_norm) if normed else None,
        k_norm=norm(spec.names.k_norm) if normed and layer.borrows is None else None,
        sinks=tensors[spec.names.sinks].float() if layer.sinks else None,
        out=tensors.linear(inside["out"], _has_bias(spec, inside["out"][0])),
        attention_out_norm=of("behind_attention"),
        mlp_norm=of("before_mlp"),
        mlp=_mlp(spec, layer, tensors),
        mlp_out_norm=of("behind_mlp"),
        per_layer=PerLayer(
            tensors.linear(inside["per_layer_gate"], False),
            tensors.linear(inside["per_layer_out"], False),
            norm(spec.names.behind_per_layer),
        )
        if spec.per_layer
        else None,
        scale_behind=float(tensors[spec.names.scale_behind]) if spec.scaled_behind else 1.0,
    )


def _convolution(spec: Spec, tensors: _Layer, name: str) -> Convolution:
    weight = tensors[f"{name}.weight"].float()[:, 0].T.contiguous()
    return Convolution(weight, tensors[f"{name}.bias"].float() if spec.conv_bias else None)


def _recurrence(spec: Spec, tensors: _Layer) -> RecurrenceWeights:
    names = spec.names
    return RecurrenceWeights(
        convolution=_convolution(spec, tensors, names.recurrence_convolution),
        decay=tensors[names.decay].float().exp(),
        step_bias=tensors[names.step_bias].float(),
        norm=tensors[f"{names.recurrence_norm}.weight"].float(),
        skip=tensors[names.skip].float() if names.skip else None,
    )


def _mlp(spec: Spec, layer: LayerSpec, tensors: _Layer) -> Dense | Experts:
    names = spec.names
    if layer.experts:
        assert spec.routing is not None
        gate_up, down = (tensors[f"{names.experts}.{which}_proj"] for which in ("gate_up", "down"))
        turned = spec.routing.transposed
        return Experts(
            router=tensors[f"{names.router}.weight"].float(),
            gate_up=gate_up.mT if turned else gate_up,
            down=down.mT if turned else down,
            router_bias=tensors[f"{names.router}.bias"].float() if spec.expert_bias else None,
            gate_up_bias=tensors[f"{names.experts}.gate_up_proj_bias"] if spec.expert_bias else None,
            down_bias=tensors[f"{names.experts}.down_proj_bias"] if spec.expert_bias else None,
            alternating=turned,
            choice_bias=tensors[names.choice_bias].float() if spec.choice_bias else None,
            shared=_dense(spec, layer, tensors) if layer.shared else None,
            shared_gate=tensors[f"{names.shared_gate}.weight"].float()[0]
            if layer.shared and spec.shared_gate
            else None,
        )
    return _dense(spec, layer, tensors)


def _dense(spec: Spec, layer: LayerSpec, tensors: _Layer) -> Dense:
    inside = products(spec, layer)
    return Dense(tensors.linear(inside["gate_up"], spec.mlp_bias), tensors.linear(inside["down"], spec.mlp_bias))
