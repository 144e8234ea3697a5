"""The model families whose forward pass we write ourselves: the parts of a model, and the places of its weights.

A `Spec` says everything that a forward pass must know, `read_weights` gives it named tensors: the same for every runner.
Flags are not trusted: biases, norms and experts exist if the model has parameters for them, and windows and scales are those
that its attention used in the dry run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.engine.kinds import OWN_FAMILIES
from headrace.engine.native.runners.skeleton import Skeleton, fuse

Tensors = Mapping[str, torch.Tensor]
Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out]."""

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE = ("default", "linear", "llama3", "yarn")
"""Angles that depend on the position alone. `dynamic` and `longrope` look at the longest sequence of the batch."""


@dataclass(frozen=True)
class Routing:
    """A mixture of experts (Shazeer et al., arXiv:1701.06538): a softmax over all experts, of which the best serve."""

    experts: int
    chosen: int
    normalise: bool
    """Whether the chosen experts' weights are made to add up to one."""


@dataclass(frozen=True)
class LayerSpec:
    window: int | None
    """A token sees itself and the window - 1 tokens before it."""
    scale: float
    """The factor of the attention scores."""
    rotary: str
    """The key of the rotary table that the layer uses."""
    inner: int
    """Width of the feed-forward part, of one expert's in a mixture."""
    experts: bool


@dataclass(frozen=True, kw_only=True)
class Spec:
    family: str
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
    tied: bool
    """The head is the embedding."""
    qk_norm: Literal["", "head", "projection"]
    """RMSNorm of queries and keys: none, over each head, over all heads at once (OLMoE)."""
    sandwich: bool
    """Whether the outputs of attention and feed-forward part are also normalised before they are added (Gemma)."""
    norm_offset: float
    """Added to the weights of norms (Gemma: 1)."""
    embed_scale: float
    routing: Routing | None


@dataclass(frozen=True)
class Dense:
    gate_up: Linear
    """Rows of the gate, then those of up."""
    down: Linear


@dataclass(frozen=True)
class Experts:
    router: torch.Tensor
    """[E, H] float32"""
    gate_up: torch.Tensor
    """[E, 2 * inner, H]"""
    down: torch.Tensor
    """[E, H, inner]"""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of norms are float32 with the offset added; the others are views into the update where that is possible."""

    attention_norm: torch.Tensor
    qkv: Linear
    """Rows of q, then k, then v."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Dense | Experts
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True)
class Weights:
    embed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor


# --- what the model is -------------------------------------------------------------------------------------------------


def refusal(skeleton: Skeleton) -> str:
    """Empty if a `Spec` can describe the model to the last parameter; else the reason why not, a whole clause."""
    config = skeleton.config
    if config.model_type not in OWN_FAMILIES:
        return f"{config.model_type} is none of the families that have a decoder of ours ({', '.join(OWN_FAMILIES)})"
    if skeleton.paged is None:
        return skeleton.objection
    if _activation(config) not in _ACTIVATIONS:
        return f"its activation is {_activation(config)}, and ours are {' and '.join(_ACTIVATIONS)}"
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "clip_qkv"):
        if getattr(config, name, None):
            return f"its config sets {name}"
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") not in _ROPE:
            return f"its rotary positions are of type {parameters.get('rope_type')}, and ours are {', '.join(_ROPE)}"
    expected = expected_shapes(read_spec(skeleton))
    if expected != skeleton.shapes:
        odd = next(name for name in (*expected, *skeleton.shapes) if expected.get(name) != skeleton.shapes.get(name))
        return f"its parameter {odd} has a shape or a place that the family does not have"
    return ""


def serves(skeleton: Skeleton) -> bool:
    """Whether a `Spec` can describe the model to the last parameter. Other models use Hugging Face's forward."""
    return not refusal(skeleton)


def mixes(skeleton: Skeleton) -> bool:
    """Whether it is a known mixture of experts."""
    return serves(skeleton) and _routing(skeleton.config) is not None


def read_spec(skeleton: Skeleton) -> Spec:
    config, shapes, geometry = skeleton.config, skeleton.shapes, skeleton.geometry
    gemma = config.model_type == "gemma3_text"
    norm = shapes.get("model.layers.0.self_attn.q_norm.weight")
    return Spec(
        family=config.model_type,
        layers=tuple(_layer_spec(skeleton, index) for index in range(geometry.layers)),
        heads=config.num_attention_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        hidden=config.hidden_size,
        vocabulary=skeleton.vocabulary,
        eps=config.rms_norm_eps,
        activation="gelu_tanh" if _activation(config) == "gelu_pytorch_tanh" else "silu",
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        out_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in shapes,
        tied="lm_head.weight" not in shapes,
        qk_norm="" if norm is None else "head" if norm == (geometry.head_dim,) else "projection",
        sandwich="model.layers.0.pre_feedforward_layernorm.weight" in shapes,
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=config.hidden_size**0.5 if gemma else 1.0,
        routing=_routing(config),
    )


def _layer_spec(skeleton: Skeleton, index: int) -> LayerSpec:
    shapes, prefix = skeleton.shapes, f"model.layers.{index}.mlp."
    down = shapes.get(f"{prefix}experts.down_proj", shapes.get(f"{prefix}down_proj.weight", (0,)))
    return LayerSpec(
        skeleton.windows[index],
        skeleton.scales[index],
        skeleton.config.layer_types[index] if skeleton.config.model_type == "gemma3_text" else "",
        inner=down[-1],
        experts=f"{prefix}experts.down_proj" in shapes,
    )


def _routing(config: Any) -> Routing | None:
    if config.model_type == "mixtral":
        return Routing(config.num_local_experts, config.num_experts_per_tok, normalise=True)
    if config.model_type in ("qwen3_moe", "olmoe"):
        return Routing(config.num_experts, config.num_experts_per_tok, config.norm_topk_prob)
    return None


def _activation(config: Any) -> str | None:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One a kind of layer where these differ (Gemma 3), else one."""
    parameters = config.rope_parameters
    return [parameters] if "rope_type" in parameters else [parameters[kind] for kind in set(config.layer_types)]


def rotary_tables(
    skeleton: Skeleton, length: int, device: torch.device
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns cos and sin [length, D] float32 for every kind of layer, computed by the model's own module."""
    rotary, config = skeleton.model.model.rotary_emb, skeleton.config
    kinds = sorted(set(config.layer_types)) if config.model_type == "gemma3_text" else [""]
    positions, like = torch.arange(length, device=device)[None], torch.empty(0, device=device)
    tables = {kind: rotary(like, positions, *([kind] if kind else [])) for kind in kinds}
    return {kind: (cos[0], sin[0]) for kind, (cos, sin) in tables.items()}


# --- where its weights are ---------------------------------------------------------------------------------------------


def expected_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Every parameter of such a model by its canonical name."""
    shapes = {
        "model.embed_tokens.weight": (spec.vocabulary, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocabulary, spec.hidden)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(spec, layer).items()}
    return shapes


def linear_shapes(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """The layer's linear modules, experts aside: (out, in) by the name within the layer."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = {
        "self_attn.q_proj": (q, spec.hidden),
        "self_attn.k_proj": (kv, spec.hidden),
        "self_attn.v_proj": (kv, spec.hidden),
        "self_attn.o_proj": (spec.hidden, q),
    }
    if layer.experts:
        return attention
    return attention | {
        "mlp.gate_proj": (layer.inner, spec.hidden),
        "mlp.up_proj": (layer.inner, spec.hidden),
        "mlp.down_proj": (spec.hidden, layer.inner),
    }


def expert_shapes(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, int, int]]:
    """(experts, out, in) of the layer's stacked experts; empty for a dense layer."""
    if not layer.experts:
        return {}
    assert spec.routing is not None, "experts need a router"
    return {
        "mlp.experts.gate_up_proj": (spec.routing.experts, 2 * layer.inner, spec.hidden),
        "mlp.experts.down_proj": (spec.routing.experts, spec.hidden, layer.inner),
    }


def _layer_shapes(spec: Spec, layer: LayerSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in linear_shapes(spec, layer).items():
        shapes[f"{name}.weight"] = shape
        if _has_bias(spec, name):
            shapes[f"{name}.bias"] = shape[:1]
    shapes |= expert_shapes(spec, layer)
    if layer.experts:
        assert spec.routing is not None
        shapes["mlp.gate.weight"] = (spec.routing.experts, spec.hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if spec.sandwich else []
    shapes |= {f"{name}.weight": (spec.hidden,) for name in norms}
    if spec.qk_norm:
        whole = spec.qk_norm == "projection"
        for name, heads in (("q_norm", spec.heads), ("k_norm", spec.kv_heads)):
            shapes[f"self_attn.{name}.weight"] = (spec.head_dim * heads if whole else spec.head_dim,)
    return shapes


def _has_bias(spec: Spec, name: str) -> bool:
    if name.startswith("mlp."):
        return spec.mlp_bias
    return spec.out_bias if name == "self_attn.o_proj" else spec.qkv_bias


def read_weights(spec: Spec, tensors: Tensors) -> Weights:
    """`tensors`: every parameter by its canonical name, shapes checked."""
    embed = tensors["model.embed_tokens.weight"]
    layers = [_layer_weights(spec, layer, _Layer(tensors, index)) for index, layer in enumerate(spec.layers)]
    norm = tensors["model.norm.weight"].float() + spec.norm_offset
    return Weights(embed, layers, norm, embed if spec.tied else tensors["lm_head.weight"])


@dataclass(frozen=True)
class _Layer:
    """The tensors of one layer."""

    tensors: Tensors
    index: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[f"model.layers.{self.index}.{name}"]

    def linear(self, *names: str, bias: bool) -> Linear:
        """Several matrices over one input as one."""
        weight = fuse([self[f"{name}.weight"] for name in names])
        return weight, fuse([self[f"{name}.bias"] for name in names]) if bias else None


def _layer_weights(spec: Spec, layer: LayerSpec, tensors: _Layer) -> LayerWeights:
    def norm(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].float() + spec.norm_offset

    behind_attention, behind_mlp = None, None
    before_mlp = norm("post_attention_layernorm")
    if (
        spec.sandwich
    ):  # Gemma's `post_attention_layernorm` is after attention, as its name says; the others' is before the MLP
        behind_attention, behind_mlp = before_mlp, norm("post_feedforward_layernorm")
        before_mlp = norm("pre_feedforward_layernorm")
    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=tensors.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=spec.qkv_bias),
        q_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        out=tensors.linear("self_attn.o_proj", bias=spec.out_bias),
        attention_out_norm=behind_attention,
        mlp_norm=before_mlp,
        mlp=_mlp(spec, layer, tensors),
        mlp_out_norm=behind_mlp,
    )


def _mlp(spec: Spec, layer: LayerSpec, tensors: _Layer) -> Dense | Experts:
    if layer.experts:
        router = tensors["mlp.gate.weight"].float()
        return Experts(router, tensors["mlp.experts.gate_up_proj"], tensors["mlp.experts.down_proj"])
    return Dense(
        tensors.linear("mlp.gate_proj", "mlp.up_proj", bias=spec.mlp_bias),
        tensors.linear("mlp.down_proj", bias=spec.mlp_bias),
    )
