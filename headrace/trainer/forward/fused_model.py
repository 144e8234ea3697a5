"""Puts the kernels into a Hugging Face model: modules of known shape are given another `forward`, everything else stays.

A module is recognised by its parts, not by its family's name, and accepted only after a trial: norms and activations must
reproduce their own numbers, and the whole model its own hidden states and gradients; otherwise the kernels are removed again.

Parameters, names and hooks are untouched, so adapters wrap the same layers, checkpointing wraps the same blocks, and a
checkpoint has the same keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.image_embedding import ImageEmbedding
from headrace.trainer.forward.carried import carried_hidden
from headrace.trainer.forward.forward import Forward, inner_of, own_hidden, packed_hidden, within
from headrace.trainer.forward.fused import fused_ops, fused_products
from headrace.trainer.forward.fused.fused_mixtures import factors, fuse_mixtures, is_gelu, layer_of, same_experts
from headrace.trainer.forward.fused.fused_ops import PackedWeight, Segments
from headrace.trainer.forward.tree_attention import Tree, tree_of
from headrace.trainer.kernels import binding
from headrace.trainer.kernels.binding import built
from headrace.trainer.packing import ROOT, Segment

TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3
"""Largest differences of hidden states and of gradients from the model's own, relative to their norm. Rounding gives 1e-5 and, with
sums that begin with a large residual stream (SmolLM2), 1.3e-4."""

GEMMA_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
"""Norms of a layer of Gemma 3 besides the usual two."""


@dataclass(frozen=True)
class NormSpec:
    eps: float
    unit: float
    """Added to the weight."""


def fuse(forward: Forward) -> tuple[str, ...]:
    """Replace the supported modules of the model, which is in float32. Returns the kinds of modules that now use kernels; none
    on other devices than the CPU, or without a compiler."""
    model = forward.model
    if model.device.type != "cpu" or binding.library() is None:
        return ()
    kinds: dict[str, Callable[[Any, Forward], list[Any]]] = {
        "norms": _fuse_norms,
        "activations": _fuse_gated,
        "products": _fuse_linears,
        "attention": _fuse_attention,
        "mixtures": lambda model, _: fuse_mixtures(model),
        "layers": _fuse_layers,
    }
    with same_experts(model):
        expected = _numbers(forward)
        done = {kind: fused for kind, put in kinds.items() if (fused := put(model, forward))}
        for kind, modules in reversed(list(done.items())):
            if _holds(forward, expected):
                break
            for module in modules:
                del module.forward
            del done[kind]
    _fuse_ends(model, "layers" in done)
    return tuple(done)


def why_none(device: torch.device) -> str:
    """Returns the reason why a model uses no kernels."""
    if device.type != "cpu":
        return "they are for the CPU"
    if binding.library() is None:
        return f"there are none here ({built().reason})"
    return "they do not reproduce this model's own numbers"


def _numbers(forward: Forward) -> list[Tensor]:
    """Hidden states of a few tokens, and gradients of all vectors among the parameters, which lie all along the way."""
    tokens, positions, tree = _probe(forward.model)
    trained = [p for p in forward.model.base_model.parameters() if p.requires_grad]
    vectors = [p for p in trained if p.ndim == 1]
    with torch.enable_grad(), _frozen([p for p in trained if p.ndim > 1]):
        if forward.packed:
            hidden = packed_hidden(forward.model, tokens, positions, tree)
        elif forward.carried:
            inner = inner_of(forward.model)
            hidden = within(forward.model, lambda: carried_hidden(inner, tokens, PROBED))
        else:
            hidden = own_hidden(forward.model, tokens)
        slope = torch.linspace(-1, 1, hidden.numel()).view_as(hidden).cos()
        grads = torch.autograd.grad((hidden * slope).sum(), vectors, allow_unused=True) if vectors else ()
    return [hidden.detach(), *(torch.zeros(1) if grad is None else grad for grad in grads)]


@contextmanager
def _frozen(parameters: list[Tensor]) -> Iterator[None]:
    """The gradients of matrices would be left in their `.grad`."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _holds(forward: Forward, expected: list[Tensor]) -> bool:
    try:
        return _agree(_numbers(forward), expected)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # whatever it was, it cannot go this way
        return False


PROBED = (Segment(0, 5), Segment(5, 3, 0), Segment(8, 4, 0), Segment(12, 2, 2), Segment(14, 6, ROOT))
"""A prompt of five tokens with two completions, one of which forks, and another sequence."""


def _probe(model: Any) -> tuple[Tensor, Tensor, Tree]:
    """Tokens [20] of the segments `PROBED`, their positions, and the tree."""
    positions = torch.tensor([*range(8), *range(5, 11), *range(6)])
    tokens = torch.arange(1, 21) * 7919 % model.get_input_embeddings().weight.shape[0]
    return tokens, positions, tree_of(PROBED, torch.device("cpu"))


def _agree(actual: list[Tensor], expected: list[Tensor]) -> bool:
    limits = [TOLERANCE, *[GRADIENT_TOLERANCE] * (len(expected) - 1)]
    return all((a - e).norm() <= limit * e.norm() for a, e, limit in zip(actual, expected, limits, strict=True))


# -- products ---------------------------------------------------------------------------------------------------------------


def _low() -> bool:
    return factors() == torch.bfloat16


def _fuse_linears(model: Any, forward: Forward) -> list[Any]:
    head = model.get_output_embeddings()
    found: list[Any] = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    for module in found:
        module.packed = PackedWeight()
        module.forward = MethodType(_linear, module)
    return found


def _fuse_ends(model: Any, served: bool) -> None:
    """Log-probs are those of logits in float32, where a head without a bias is all that makes them. Where the layers are computed
    as they are served, the embedding is as well."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is nn.Linear and head.bias is None:
        head.packed = PackedWeight()
    plain = type(embedding) is nn.Embedding or hasattr(embedding, "scalar_embed_scale")  # the other is Gemma's
    if served and plain and not isinstance(embedding, ImageEmbedding) and embedding.max_norm is None:
        setattr(embedding, "forward", MethodType(_embedding, embedding))  # noqa: B010 (mypy knows the class)


def _linear(module: Any, x: Tensor) -> Tensor:
    return _together(x, module)[0]


def _onto(total: Tensor, x: Tensor, module: Any, norm: Any = None) -> Tensor:
    """total + module(x), or its norm: in one operation, or two, where the module is a linear layer."""
    if (layer := layer_of(module)) is None:
        return total + (module(x) if norm is None else norm(module(x)))
    if norm is None:
        return fused_products.linear_onto(total, x, layer, factors())
    (side,) = fused_products.linears(x, [layer], factors(), [True])
    weight, eps, unit = norm.weight, norm.fused.eps, norm.fused.unit
    return fused_ops.add_rms_norm(total, side, weight=weight, eps=eps, unit=unit, dtype=factors())


def _together(x: Tensor, *modules: Any, wide: tuple[bool, ...] | None = None) -> tuple[Tensor, ...]:
    """Several modules over the same x: in one operation where all of them are linear layers. `wide`: which results are float32, at
    least where they are."""
    layers = [layer for module in modules if (layer := layer_of(module)) is not None]
    if len(layers) == len(modules):
        return fused_products.linears(x, layers, factors(), wide)
    return tuple(module(x) for module in modules)


# -- norms and activations --------------------------------------------------------------------------------------------------


def _fuse_norms(model: Any, forward: Forward) -> list[Any]:
    found = []
    for module in model.modules():
        spec = _norm_spec(module)
        if spec is not None:
            module.fused = spec
            module.forward = MethodType(_norm, module)
            found.append(module)
    return found


def _norm_spec(module: Any) -> NormSpec | None:
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float) or [*module.parameters()] != [weight]:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gate is another input
        return None
    x = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1)
    with torch.no_grad():
        expected = module(x)
        for unit in (0.0, 1.0):
            if torch.allclose(fused_ops.rms_norm(x, weight, eps, unit, x.dtype), expected, rtol=1e-4, atol=1e-5):
                return NormSpec(eps, unit)
    return None


def _norm(module: Any, x: Tensor) -> Tensor:
    return fused_ops.rms_norm(x, module.weight, module.fused.eps, module.fused.unit, _dtype(x))


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype of the inputs of products."""
    return torch.bfloat16 if _low() else x.dtype


def _fuse_gated(model: Any, forward: Forward) -> list[Any]:
    found = []
    for module in model.modules():
        parts = {"gate_proj", "up_proj", "down_proj"}
        if parts <= (names := {name for name, _ in module.named_children()}) and names <= parts | {"act_fn"}:
            gelu = is_gelu(module.act_fn)
            if gelu is not None:
                module.gelu = gelu
                module.forward = MethodType(_gated, module)
                found.append(module)
    return found


def _gated(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(_inner(module, x))


def _inner(module: Any, x: Tensor) -> Tensor:
    """The input of the feed-forward part's last product."""
    gate_layer, up_layer = layer_of(module.gate_proj), layer_of(module.up_proj)
    if _low() and gate_layer is not None and up_layer is not None:
        return fused_products.gated_linear(x, gate_layer, up_layer, module.gelu)
    gate, up = _together(x, module.gate_proj, module.up_proj)
    return fused_ops.gated(gate, up, module.gelu)


def _embedding(module: Any, tokens: Tensor) -> Tensor:
    """Returns the embeddings of tokens, rounded as in the engine."""
    found = nn.Embedding.forward(module, tokens)
    found = fused_ops.rounded(found.float()) if _low() else found
    return found * getattr(module, "scalar_embed_scale", 1.0)


# -- attention --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionSpec:
    dim: int
    scale: float
    window: int | None
    """The sliding window that the module passes to its attention function."""


def _fuse_attention(model: Any, forward: Forward) -> list[Any]:
    if not forward.packed:
        return []
    tokens, positions, tree = _probe(model)
    with torch.no_grad():
        packed_hidden(model, tokens, positions, tree)
    windows: Iterator[int | None] = iter(tree.windows)
    found = []
    for module in model.modules():
        if not all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")):
            continue
        spec = AttentionSpec(module.head_dim, float(module.scaling), next(windows, None))
        if _is_plain(module, spec):
            module.fused = spec
            module.forward = MethodType(_attention, module)
            found.append(module)
    return found


def _is_plain(module: Any, spec: AttentionSpec) -> bool:
    """Whether the layer is made of projections, rotary embeddings and norms of single heads or of all, and of nothing else."""
    names = {name for name, _ in module.named_children()}
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if name in names]
    odd = ("attn_logit_softcapping", "sinks", "clip_qkv", "qkv_bias_gate")
    return (
        names <= {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
        and len(norms) in (0, 2)
        and all(isinstance(getattr(norm, "fused", None), NormSpec) for norm in norms)
        and all(getattr(module, name, None) is None for name in odd)
        and getattr(module.config, "clip_qkv", None) is None
    )


def _attention(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    mixed = None if args else _mixed(module, hidden_states, **kwargs)
    if mixed is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    return module.o_proj(mixed), None


def _mixed(module: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor | None:
    """The input of the attention's last product; None if the module's own forward has to run."""
    tree, places = kwargs.get("tree"), kwargs.get("position_embeddings")
    if tree is None or tree.ahead is not None or places is None or kwargs.get("past_key_values") is not None:
        return None
    spec: AttentionSpec = module.fused
    tree.windows.append(spec.window)
    count = hidden_states.shape[-2]
    q, k, v = (
        x.view(count, -1, spec.dim)
        for x in _together(hidden_states, module.q_proj, module.k_proj, module.v_proj, wide=(True, True, False))
    )
    cos, sin = (x.reshape(-1, spec.dim).float().contiguous() for x in places)
    q, k = (
        _rotated(x, cos, sin, norm=getattr(module, name, None), dtype=v.dtype)
        for x, name in ((q, "q_norm"), (k, "k_norm"))
    )
    out = fused_ops.attention(q, k, v=v, segments=_segments(tree), scale=spec.scale, window=spec.window or 0)
    return out.view(*hidden_states.shape[:-1], -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, norm: Any, dtype: torch.dtype) -> Tensor:
    weight, eps, unit = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.fused.eps, norm.fused.unit)
    if weight is not None and len(weight) != x.shape[-1]:  # one norm over all heads, as OLMoE has it
        x = fused_ops.rms_norm(x.flatten(1), weight, eps, unit, dtype, wide=True).view(x.shape)
        weight = None
    return fused_ops.rotary(x, cos, sin=sin, weight=weight, eps=eps, unit=unit, dtype=dtype)


def _segments(tree: Any) -> Segments:
    """Kept with the tree: every layer asks."""
    if not hasattr(tree, "fused"):
        tree.fused = Segments.of(tree.segments)
    return tree.fused


# -- layers -----------------------------------------------------------------------------------------------------------------


def _fuse_layers(model: Any, forward: Forward) -> list[Any]:
    norms = {"input_layernorm", "post_attention_layernorm"}
    found = []
    for module in model.modules():
        names = {name for name, _ in module.named_children()}
        if names >= norms and names - norms in ({"self_attn", "mlp"}, {"self_attn", "mlp", *GEMMA_NORMS}):
            names -= {"self_attn", "mlp"}
            if all(isinstance(getattr(getattr(module, name), "fused", None), NormSpec) for name in names):
                module.forward = MethodType(_layer, module)
                found.append(module)
    return found


def _layer(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """x + attention(norm(x)), then x + mlp(norm(x)): sums begin with x, as the engine's do. Gemma adds norms of both results."""
    attention, mlp = module.self_attn, module.mlp
    before_mlp, after_attention, after_mlp = module.post_attention_layernorm, None, None
    if hasattr(module, "pre_feedforward_layernorm"):
        after_attention, before_mlp = before_mlp, module.pre_feedforward_layernorm
        after_mlp = module.post_feedforward_layernorm
    normed = module.input_layernorm(hidden_states)
    mixed = None if args or not _is_fused(attention) else _mixed(attention, normed, **kwargs)
    if mixed is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    total = _onto(hidden_states, mixed, attention.o_proj, after_attention)
    normed = before_mlp(total)
    if _is_fused(mlp) and hasattr(mlp, "gelu"):
        return _onto(total, _inner(mlp, normed), mlp.down_proj, after_mlp)
    return total + (mlp(normed) if after_mlp is None else after_mlp(mlp(normed)))


def _is_fused(module: Any) -> bool:
    """Whether the module has a `forward` of ours and was not wrapped since."""
    return "forward" in vars(module)
