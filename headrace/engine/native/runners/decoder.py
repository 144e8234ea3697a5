"""The fused decoder: the forward pass of the known families (`families.py`) in plain PyTorch.

One flat pass over N ragged tokens; q, k, v in one product and gate, up in another. The residual stream is float32, as the
trainer's is under autocast, and only what is multiplied is rounded to the serving dtype: with a stream in bfloat16 the
log-probs of a small model were 0.06 to 0.09 nats off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding, gelu, layer_norm, rms_norm, silu

from headrace.core.weights import AdapterSpec
from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.adapter_tensors import read_adapter
from headrace.engine.native.runners.attention import Pass
from headrace.engine.native.runners.families import query_factors, read_spec, rotary_tables
from headrace.engine.native.runners.families import refusal as family_refusal
from headrace.engine.native.runners.fp8 import Fp8, Fp8Matrix, Fp8Stack
from headrace.engine.native.runners.graphs import Capture, Passed, PassGraphs, on_cuda
from headrace.engine.native.runners.layers import (
    Adapter,
    AdapterSlots,
    Groups,
    Masked,
    Matrix,
    Mixture,
    Stack,
    by_adapter,
    groups,
    packs,
    route,
)
from headrace.engine.native.runners.paged import EXACT_ROWS, TRIED, PagedRunner, in_pieces, require_exact
from headrace.engine.native.runners.pages import Softmax
from headrace.engine.native.runners.skeleton import Skeleton
from headrace.engine.native.runners.weight_places import (
    Experts,
    LayerSpec,
    LayerWeights,
    Linear,
    Spec,
    Tensors,
    read_weights,
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    spec: LayerSpec
    attention_norm: torch.Tensor | None
    qkv: Matrix
    qk_norm: torch.Tensor | None
    """[Hq + Hkv, D], whatever it is taken over."""
    sinks: torch.Tensor | None
    out: Matrix
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: tuple[Matrix, Matrix] | Mixture
    """Gate and up, down."""
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True)
class Decoder:
    """Weights ready to serve."""

    embed: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: Matrix


@dataclass
class Inputs:
    """One pass on the device."""

    tokens: torch.Tensor
    rows: torch.Tensor
    attention: Pass
    adapters: Groups | Masked | None
    routing: list[torch.Tensor] | None
    """Filled with the experts [N, K] of each layer that has some, when asked for."""


def refusal(skeleton: Skeleton) -> str:
    """Empty if the decoder serves the model; else the reason why not, a whole clause."""
    if reason := family_refusal(skeleton):
        return reason
    spec = read_spec(skeleton)
    if len({(layer.kv_heads, layer.head_dim) for layer in spec.layers}) > 1:
        return "heads of several sizes are served by the C++ kernels alone"
    if spec.values_normed or spec.per_layer or any(layer.borrows is not None for layer in spec.layers):
        return "norms of values, shared keys and embeddings of single layers are computed by the C++ kernels alone"
    if any(layer.recurrence for layer in spec.layers) or spec.factors:
        return "recurrences and factors of products are computed by the C++ kernels alone"
    if spec.gated or spec.head_gated:
        return "gates of what attention gives are computed by the C++ kernels alone"
    if any(layer.shared for layer in spec.layers):
        return "experts that serve every token are computed by the C++ kernels alone"
    if spec.routing and spec.routing.sigmoid:
        return "experts that are chosen by sigmoids are served by the C++ kernels alone"
    if spec.activation == "squared":
        return "feed-forward parts without a gate are computed by the C++ kernels alone"
    convolves = any(layer.kernel for layer in spec.layers)
    return "its convolutions are computed by the C++ kernels alone" if convolves else ""


class FusedRunner(PagedRunner):
    def __init__(
        self,
        model: Skeleton,
        context_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        max_adapters: int = 0,
        fp8: Fp8 | None = None,
    ) -> None:
        """`fp8`: multiplies linear layers and experts in FP8; the head, embeddings, routers, norms and adapters stay in `dtype`."""
        super().__init__(model.geometry, dtype, device, exact)
        self.spec, self._fp8 = (spec := read_spec(model)), fp8
        if exact and fp8:
            require_exact(dtype, device, lambda x, weight: Fp8Matrix((weight, None), fp8)(x), TRIED)
        self.path = f"fused {spec.family}" + (", fp8" if fp8 else "")
        mixtures = sum(layer.experts for layer in spec.layers)
        self.experts = (mixtures, spec.routing.chosen) if spec.routing else (0, 0)
        tables = rotary_tables(model, context_length, device)
        self._rotary = {kind: _rolled(*table, spec.neighbours) for kind, table in tables.items()}
        self._query_factors = query_factors(spec, context_length, device)
        self._gate = silu if spec.activation == "silu" else _gelu_tanh
        self._pack = packs(dtype, device)
        self._decoder: Decoder | None = None
        self._slots: list[Adapter | None] = [None] * max_adapters
        self._graphs: PassGraphs | None = None
        self._static_slots = AdapterSlots(max_adapters)
        self._context, self._most = context_length, (0, 0)
        self._off = "engine.exact = true" if exact else "the CPU has none"
        """The reason why there are no graphs at all, where there are none."""
        self.feeds = device.type == "cuda" and not exact
        if self.feeds:
            self.replay_with(on_cuda(device))

    # -- weights ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, tensors: Tensors) -> Decoder:
        weights = read_weights(self.spec, tensors)
        layers = [self._layer(spec, layer) for spec, layer in zip(self.spec.layers, weights.layers, strict=True)]
        return Decoder(weights.embed, layers, weights.norm, Matrix((weights.head, None), self._pack))

    def use(self, weights: Decoder) -> Decoder | None:
        """Makes `weights` live. If CUDA graphs have captured the old addresses, the values are copied there."""
        if self._graphs is not None and not _static(weights):
            self._graphs, self._off = None, "experts of this dtype and these widths are multiplied one by one"
        if self._graphs is None:
            replaced, self._decoder = self._decoder, weights
            return replaced
        if self._decoder is None:
            self._decoder = _rebuilt(weights, torch.clone)
            self._graphs.prepare(*self._most)
        else:
            torch._foreach_copy_(_tensors(self._decoder), _tensors(weights))
        return None

    def free(self) -> None:
        super().free()
        self._decoder = None
        if self._graphs is not None:  # they have captured addresses of both
            used = self._graphs.used
            self.replay_with(self._graphs.capture)
            self._graphs.used = used

    def replay_with(self, capture: Capture | None) -> None:
        """Passes are CUDA graphs. Called before the first weights. Without `capture`, they are neither captured nor replayed."""
        self._graphs = PassGraphs(self._graphed, self._cache, capture, self._context)

    def expect(self, rows: int, tokens: int) -> None:
        """Sizes up to these are captured with the first weights, and not in the middle of decoding. `tokens`: of a pass with chunks."""
        self._most = rows, tokens

    @torch.no_grad()
    def prepare_adapter(self, spec: AdapterSpec, tensors: Tensors) -> Adapter:
        return read_adapter(self.spec, spec, tensors=tensors, dtype=self.dtype, device=self.device, exact=self.exact)

    def use_adapter(self, slot: int, adapter: Adapter | None) -> None:
        self._slots[slot] = adapter
        if self._graphs is not None and not self._static_slots.put(slot, adapter):
            self._graphs.forget()
            if self._decoder is not None:
                self._graphs.prepare(*self._most)

    def _matrix(self, weights: Linear) -> Matrix:
        return Fp8Matrix(weights, self._fp8) if self._fp8 else Matrix(weights, self._pack)

    def _stack(self, weight: torch.Tensor) -> Stack:
        return (
            Fp8Stack(weight.contiguous(), self._fp8, self.exact) if self._fp8 else Stack(weight, self._pack, self.exact)
        )

    def _layer(self, spec: LayerSpec, weights: LayerWeights) -> Layer:
        mlp = weights.mlp
        assert weights.qkv is not None and weights.out is not None and mlp is not None, "all layers have both parts"
        mixture: tuple[Matrix, Matrix] | Mixture
        if isinstance(mlp, Experts):
            assert self.spec.routing is not None
            mixture = Mixture(mlp, self.spec.routing, partial(self._activate, alternating=mlp.alternating), self._stack)
        else:
            mixture = self._matrix(mlp.gate_up), self._matrix(mlp.down)
        return Layer(
            spec=spec,
            attention_norm=weights.attention_norm,
            qkv=self._matrix(weights.qkv),
            qk_norm=_qk_norm(self.spec, weights),
            sinks=weights.sinks,
            out=self._matrix(weights.out),
            attention_out_norm=weights.attention_out_norm,
            mlp_norm=weights.mlp_norm,
            mlp=mixture,
            mlp_out_norm=weights.mlp_out_norm,
        )

    # -- the pass -----------------------------------------------------------------------------------------------------------

    def _forward(self, batch: ForwardInput) -> ForwardOutput:
        reason = self._not_graphed(batch)
        if self._graphs is not None or self.device.type == "cuda":
            self.passes.count(reason)
        if self._graphs is not None and not reason:
            hidden, experts = self._graphs.forward(batch)
            return ForwardOutput(self._logits(hidden), None if experts is None else self._reported(experts))
        if batch.fed is not None:
            batch = replace(batch, tokens=batch.fed.cpu().numpy(), fed=None)
        batch, went = by_adapter(batch)
        inputs = self._inputs(batch)
        for x in self._layers(inputs):
            last = x
        logits = self._logits(last[inputs.rows])
        if not inputs.routing:
            return ForwardOutput(logits)
        routing = self._reported(torch.stack(inputs.routing, 1))
        return ForwardOutput(logits, routing if went is None else routing[went])

    def _reported(self, experts: torch.Tensor) -> np.ndarray:
        assert self.spec.routing is not None
        return experts.cpu().numpy().astype(np.uint8 if self.spec.routing.experts <= 256 else np.uint16)

    def _not_graphed(self, batch: ForwardInput) -> str:
        """Empty, or why this batch is not replayed."""
        if self._graphs is None:
            return self._off
        return self._graphs.refusal(batch) or self._static_slots.refusal(batch.adapters)

    def _graphed(self, tokens: torch.Tensor, attention: Pass, slots: torch.Tensor) -> Passed:
        """The step of a captured pass."""
        routing: list[torch.Tensor] = []
        inputs = Inputs(tokens, tokens, attention, self._static_slots.masked(slots), routing)
        for x in self._layers(inputs):
            last = x
        return Passed(last, torch.stack(routing, 1) if routing else None)

    @torch.inference_mode()
    def blame(self, batch: ForwardInput) -> np.ndarray:
        batch, went = by_adapter(batch)
        inputs = self._inputs(batch)
        blamed = torch.full((len(batch.tokens),), -1, device=self.device)
        for index, x in enumerate(self._layers(inputs)):
            blamed[(blamed < 0) & ~x.isfinite().all(-1)] = index
            last = x
        rows, broken = inputs.rows, ~self._logits(last[inputs.rows]).isfinite().all(-1)
        blamed[rows] = torch.where((blamed[rows] < 0) & broken, len(self.spec.layers), blamed[rows])
        found = blamed.cpu().numpy()
        return found if went is None else found[went]

    def _inputs(self, batch: ForwardInput) -> Inputs:
        return Inputs(
            self._tensor(batch.tokens),
            self._tensor(batch.rows),
            self._plan(batch),
            groups(batch, self._slots, self.exact),
            [] if batch.routing else None,
        )

    def _layers(self, inputs: Inputs) -> Iterator[torch.Tensor]:
        """The residual stream [N, H] float32 after every layer; one tensor, which the next layer changes."""
        assert self._decoder is not None, "forward before the first weights"
        x = embedding(inputs.tokens, self._decoder.embed).float()
        if self.spec.embed_scale != 1.0:
            x *= self.spec.embed_scale
        places = inputs.attention.positions
        rotary = {kind: (cos[places, None], sin[places, None]) for kind, (cos, sin) in self._rotary.items()}
        for index, layer in enumerate(self._decoder.layers):
            normed = self._norm(x, layer.attention_norm)
            out = self._attention(index, layer, normed, rotary[layer.spec.rotary], inputs)
            x.add_(self._behind(out, layer.attention_out_norm), alpha=self.spec.residual_scale)
            out = self._mlp(index, layer, normed if self.spec.parallel else self._norm(x, layer.mlp_norm), inputs)
            x.add_(self._behind(out, layer.mlp_out_norm), alpha=self.spec.residual_scale)
            yield x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, H] -> [R, V]"""
        assert self._decoder is not None
        x = self._norm(x, self._decoder.norm)
        logits = in_pieces(self._decoder.head.wide, x, EXACT_ROWS) if self.exact else self._decoder.head.wide(x)
        cap = self.spec.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _attention(
        self, index: int, layer: Layer, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], inputs: Inputs
    ) -> torch.Tensor:
        spec, count = self.spec, self.spec.heads + self.spec.kv_heads
        heads = _multiply(layer.qkv, "qkv", index, x, inputs).view(len(x), -1, spec.head_dim)
        qk = heads[:, :count].float()
        if layer.qk_norm is not None:
            qk = self._normed_heads(qk) * layer.qk_norm
        cos, sin = rotary
        qk = _turned(qk, cos, sin, spec.neighbours)
        if self._query_factors is not None:
            qk[:, : spec.heads] *= self._query_factors[inputs.attention.positions, None, None]
        qk = qk.to(self.dtype)
        out = inputs.attention.attend(
            index,
            qk[:, : spec.heads],
            qk[:, spec.heads :],
            heads[:, count:],
            scale=layer.spec.scale,
            window=layer.spec.window,
            softmax=Softmax(layer.spec.cap or None, layer.sinks),
        )
        return _multiply(layer.out, "out", index, out.reshape(len(x), -1), inputs)

    def _normed_heads(self, qk: torch.Tensor) -> torch.Tensor:
        """[N, Hq + Hkv, D] without the weights."""
        if self.spec.qk_norm == "head":
            return rms_norm(qk, qk.shape[-1:], eps=self.spec.eps)
        parts = qk.split((self.spec.heads, self.spec.kv_heads), 1)
        return torch.cat([rms_norm(part, part.shape[1:], eps=self.spec.eps) for part in parts], 1)

    def _mlp(self, index: int, layer: Layer, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        if isinstance(layer.mlp, Mixture):
            choice = route(x, layer.mlp.router, layer.mlp.routing, layer.mlp.router_bias)
            if inputs.routing is not None:
                inputs.routing.append(choice.experts)
            return layer.mlp(x, choice, inputs.adapters.of_experts(index) if inputs.adapters else ())
        gate_up, down = layer.mlp
        hidden = self._activate(_multiply(gate_up, "gate_up", index, x, inputs))
        return _multiply(down, "down", index, hidden, inputs)

    def _activate(self, gate_up: torch.Tensor, alternating: bool = False) -> torch.Tensor:
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if alternating else gate_up.chunk(2, dim=-1)
        if clamp := self.spec.clamp:
            gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
            return (up + 1) * gate * torch.sigmoid(clamp.alpha * gate)
        return self._gate(gate) * up

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """The norm in float32, if there is one, rounded to what is multiplied next."""
        if weight is not None and self.spec.centred:
            x = layer_norm(x, weight.shape, weight, eps=self.spec.eps)
        elif weight is not None:
            x = rms_norm(x, weight.shape, weight, self.spec.eps)
        return x.to(self.dtype)

    def _behind(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x.float(), weight.shape, weight, self.spec.eps)


def _multiply(matrix: Matrix, name: str, layer: int, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    out = matrix(x)
    return out if inputs.adapters is None else inputs.adapters.add(layer, name, x, out)


def _static(weights: Decoder) -> bool:
    """Whether a pass can be captured: no shape in it depends on which experts were chosen."""
    return all(layer.mlp.static for layer in weights.layers if isinstance(layer.mlp, Mixture))


def _rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Weights with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_rebuilt(part, change) for part in value)
    if not isinstance(value, Decoder | Layer | Matrix | Mixture | Stack):
        return value
    twin = copy(value)
    for name, part in vars(value).items():
        object.__setattr__(twin, name, _rebuilt(part, change))
    return twin


def _tensors(weights: Decoder) -> list[torch.Tensor]:
    """Returns all tensors, always in the same order."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _rebuilt(weights, collect)
    return found


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return gelu(x, approximate="tanh")


def _qk_norm(spec: Spec, weights: LayerWeights) -> torch.Tensor | None:
    if weights.q_norm is None or weights.k_norm is None:
        return None
    pairs = ((weights.q_norm, spec.heads), (weights.k_norm, spec.kv_heads))
    return torch.cat([weight.view(-1, spec.head_dim).expand(heads, -1) for weight, heads in pairs])


def _rolled(cos: torch.Tensor, sin: torch.Tensor, neighbours: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables with the signs of `_turned` in the sine: x1, x2 -> -x2, x1 becomes an exchange. `neighbours`: x1 and x2 are neighbours."""
    half = sin.shape[-1] // 2
    if not neighbours:
        return cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)
    signs = torch.tensor([-1.0, 1.0], device=sin.device).repeat(half)
    return cos[:, :half].repeat_interleave(2, -1), sin[:, :half].repeat_interleave(2, -1) * signs


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """Rotary positions of heads x [N, heads, D]; numbers of a head beyond the tables have none."""
    width = cos.shape[-1]
    part = x if width == x.shape[-1] else x[..., :width]
    other = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if neighbours else part.roll(width // 2, -1)
    turned = part * cos + other * sin
    return turned if part is x else torch.cat([turned, x[..., width:]], -1)
