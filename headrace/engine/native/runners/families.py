"""Which models are of a family whose forward pass we write ourselves, and what is known of them.

Flags are not trusted: biases, norms and experts exist if the model has parameters for them, and windows and scales are those
that its attention used in the dry run. What neither shows is a fact of the family (`engine/own_families.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from headrace.engine.native.runners.skeleton import Skeleton
from headrace.engine.native.runners.weight_places import LayerSpec, Spec, expected_shapes
from headrace.engine.own_families import FAMILIES, OWN_FAMILIES

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "squared"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "squared",
}
_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Angles that depend on the position alone. `dynamic` and `longrope` look at the longest sequence of the batch: they are fixed up to a length."""


def refusal(skeleton: Skeleton) -> str:
    """Empty if a `Spec` can describe the model to the last parameter; else the reason why not, a whole clause."""
    skeleton = skeleton.language or skeleton
    config = skeleton.config
    if config.model_type not in OWN_FAMILIES:
        return f"{config.model_type} is none of the families that have a decoder of ours ({', '.join(OWN_FAMILIES)})"
    family = FAMILIES[config.model_type]
    layers = [layer for layer in range(config.num_hidden_layers) if family.attends(config, layer)]
    if skeleton.attention is None or list(skeleton.attention.layers) != layers:
        return skeleton.objection
    if reason := family.lacks(config):
        return reason
    if _activation(config) not in _ACTIVATIONS or family.ungated != (_activation(config) == "relu2"):
        return f"its activation is {_activation(config)}, and ours are silu and gelu_pytorch_tanh of a gate, and relu2 where there is none"
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
        activation=_ACTIVATIONS.get(_activation(config), "silu"),
        biased=frozenset(
            name.removesuffix(".bias").split(".", 3)[3]
            for name in shapes
            if name.startswith("model.layers.") and name.endswith(".bias")
        ),
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
        head_gated=f"{first}{names.head_gate}.weight" in shapes,
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
        factors={name: one for name, one in family.factors(config).items() if {one.into, *one.rows} != {1.0}},
    )


_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
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
        attends=family.attends(config, index),
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
    named = (getattr(config, name, None) for name in ("hidden_activation", "hidden_act", "mlp_hidden_act"))
    return next(filter(None, named), "") or FAMILIES[config.model_type].activation


def _by_kind(config: Any) -> bool:
    """Whether rotary positions are others in layers of other kinds (Gemma 3)."""
    return "rope_type" not in _rope(config)


def _rope(config: Any) -> dict[str, Any]:
    """The rotary positions of a config, which a model without any may lack."""
    return getattr(config, "rope_parameters", None) or {"rope_type": "default"}


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One a kind of layer where these differ, else one."""
    parameters = _rope(config)
    return [parameters[kind] for kind in _turned_kinds(config)] if _by_kind(config) else [parameters]


def _turned_kinds(config: Any) -> list[str]:
    """Kinds of layers with rotary positions of their own; others do not attend (LFM3's convolutions)."""
    return sorted(set(config.layer_types) & set(_rope(config)))


UNTURNED = "none"
"""The key of a rotary table that leaves all as it is."""


def rotary_tables(
    skeleton: Skeleton, length: int, device: torch.device
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns cos and sin [length, D] float32 for every kind of layer, computed by the model's own module. D is less than a head where a part of it
    has no positions."""
    family, config = FAMILIES[skeleton.model_type], skeleton.config
    rotary: Any = getattr((skeleton.language or skeleton).model.model, family.names.rotary, None)
    kinds = [] if rotary is None else _turned_kinds(config) if _by_kind(config) else [""]
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
