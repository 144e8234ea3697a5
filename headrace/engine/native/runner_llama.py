"""The fused decoder of the Llama family: Llama, SmolLM, Mistral without a window.

One flat pass over N ragged tokens; q, k, v in one product and gate, up in another, with weights that are views into the
packed update. Rounds where Hugging Face's modules round, so that both paths agree in bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, silu

from headrace.engine.native.attention import Ragged
from headrace.engine.native.skeleton import Skeleton
from headrace.engine.native.weights import fuse

Tensors = Mapping[str, torch.Tensor]
Linear = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""

_ROPE = ("default", "linear", "llama3", "yarn")
"""Angles that depend on the position alone. `dynamic` and `longrope` look at the longest sequence of the batch."""


@dataclass(frozen=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Llama:
    embed: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor


def serves(skeleton: Skeleton) -> bool:
    config = skeleton.config
    return (
        config.model_type in ("llama", "mistral")
        and all(window is None for window in skeleton.windows)
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _ROPE
    )


class LlamaRunner:
    def __init__(self, skeleton: Skeleton, context_length: int, dtype: torch.dtype, device: torch.device) -> None:
        config, self.geometry = skeleton.config, skeleton.geometry
        self.path = f"fused {config.model_type}"
        self.heads, self.eps = config.num_attention_heads, config.rms_norm_eps
        self.scale = self.geometry.head_dim**-0.5
        self.device, self.dtype = device, dtype
        self._cos, self._sin = _rotary_table(skeleton.model.model.rotary_emb, context_length, dtype, device)
        self._weights: Llama | None = None

    def prepare(self, tensors: Tensors) -> Llama:
        layers = [_layer(tensors, f"model.layers.{i}.") for i in range(self.geometry.layers)]
        embed = tensors["model.embed_tokens.weight"]
        return Llama(embed, layers, tensors["model.norm.weight"], tensors.get("lm_head.weight", embed))

    def use(self, weights: Llama) -> None:
        self._weights = weights

    def forward(self, tokens: torch.Tensor, batch: Ragged, rows: torch.Tensor) -> torch.Tensor:
        """tokens [N] -> logits [len(rows), V] of the flat positions `rows`."""
        weights = self._weights
        assert weights is not None, "forward before the first weights"
        x = embedding(tokens, weights.embed)
        cos, sin = self._cos[batch.positions, None], self._sin[batch.positions, None]
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(index, layer, self._norm(x, layer.input_norm), cos, sin, batch)
            gate, up = linear(self._norm(x, layer.mlp_norm), *layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, *layer.down)
        return linear(self._norm(x[rows], weights.norm), weights.head)

    def _attention(
        self, index: int, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Ragged
    ) -> torch.Tensor:
        count, dim = self.heads + self.geometry.kv_heads, self.geometry.head_dim
        heads = linear(x, *layer.qkv).view(len(x), -1, dim)
        qk = heads[:, :count]
        qk = qk * cos + qk.roll(dim // 2, -1) * sin
        out = batch.attend(index, qk[:, : self.heads], qk[:, self.heads :], heads[:, count:], self.scale)
        return linear(out.reshape(len(x), -1), *layer.out)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32, rounded before the weight is applied."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(x.dtype)


def _layer(tensors: Tensors, prefix: str) -> Layer:
    def part(*names: str) -> Linear:
        biases = [tensors.get(f"{prefix}{name}.bias") for name in names]
        weight = fuse([tensors[f"{prefix}{name}.weight"] for name in names])
        present = [bias for bias in biases if bias is not None]
        assert len(present) in (0, len(names)), "either all have a bias or none"
        return weight, fuse(present) if present else None

    return Layer(
        tensors[f"{prefix}input_layernorm.weight"],
        part("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        part("self_attn.o_proj"),
        tensors[f"{prefix}post_attention_layernorm.weight"],
        part("mlp.gate_proj", "mlp.up_proj"),
        part("mlp.down_proj"),
    )


def _rotary_table(
    rotary: Any, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, D], by the model's own module. The sine's first half is negated, so that rotating half of the
    dimensions (x1, x2 -> -x2, x1) becomes a plain roll."""
    positions = torch.arange(length, device=device)[None]
    cos, sin = (table[0] for table in rotary(torch.empty(0, dtype=dtype, device=device), positions))
    sign = torch.ones(sin.shape[-1], dtype=dtype, device=device)
    sign[: len(sign) // 2] = -1
    return cos, sin * sign
