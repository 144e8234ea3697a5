"""Reads LoRA adapters from tensors with the names and shapes that peft saves, into the products of the fused decoder or by module."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from headrace.core.weights import AdapterSpec
from headrace.engine.native.runners.layers import Adapter, AdapterLayer, ExpertPair, Pair, Stack
from headrace.engine.native.runners.skeleton import named_as_part
from headrace.engine.native.runners.weight_places import LayerSpec, Spec, expert_shapes, linear_shapes, products

Number = TypeVar("Number", int, float)

PREFIX = "base_model.model."
"""The prefix that peft adds to the name of a module."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of an adapter in one module, float32: a [E, r, in] and b [E, out, r] with the scale in it. A plain module is one of one expert."""

    a: torch.Tensor
    b: torch.Tensor


def read_adapter(
    base: Spec,
    spec: AdapterSpec,
    *,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    exact: bool = False,
) -> Adapter:
    """Raises ValueError naming the first tensor that the base model has no place for."""
    there = "q, k, v, o, gate, up and down projections and experts can be adapted"
    found = matrices_of(spec, named_as_part(tensors, PREFIX), _module_shapes(base), there)

    def layer(index: int, of: LayerSpec) -> AdapterLayer:
        prefix = f"model.layers.{index}."
        mine = {name.removeprefix(prefix): pair for name, pair in found.items() if name.startswith(prefix)}
        shapes = linear_shapes(base, of)
        inside = products(base, of)
        parts = {name: modules for name, modules in inside.items() if any(module in mine for module in modules)}
        linears = {name: _fused([(shapes[m], mine.get(m)) for m in parts[name]], dtype, device) for name in parts}
        experts = {
            name: ExpertPair(
                Stack(pair.a.to(device, dtype), False, exact),
                Stack(pair.b.to(device, dtype), False, exact),
                len(pair.a),
            )
            for name, stack in (("gate_up", base.names.experts_in), ("down", "down_proj"))
            if (pair := mine.get(f"{base.names.experts}.{stack}"))
        }
        return AdapterLayer(linears, experts)

    own = found.get(base.names.per_layer_into)
    per_layer = None if own is None else _fused([((own.b.shape[1], own.a.shape[2]), own)], dtype, device)
    return Adapter([layer(index, of) for index, of in enumerate(base.layers)], per_layer)


def matrices_of(
    spec: AdapterSpec, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int, int]], there: str
) -> dict[str, Matrices]:
    """An adapter's matrices by the names of modules. `shapes`: (experts, out, in) of all that can be adapted; `there`: what that is, in words. Raises
    ValueError naming the first tensor that has no place among them."""
    found: dict[str, Matrices] = {}
    for module, (a, b) in _pairs(spec, tensors).items():
        name = _module(spec, module, shapes, there, a=a, b=b)
        found[name] = _checked(spec, name, shapes[name], a, b)
    if not found:
        raise ValueError(f"the adapter {spec.name} holds no tensors; publish its lora_A and lora_B")
    return found


def _module_shapes(base: Spec) -> dict[str, tuple[int, int, int]]:
    """(experts, out, in) of everything that can be adapted."""
    shapes = {}
    for index, layer in enumerate(base.layers):
        plain = {name: (1, *shape) for name, shape in linear_shapes(base, layer).items()}
        for name, shape in (plain | expert_shapes(base, layer)).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    if base.per_layer:
        shapes[base.names.per_layer_into] = 1, len(base.layers) * base.per_layer, base.hidden
    return shapes


def _pairs(spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module name as peft has it -> its A and B."""
    names = []
    for name in tensors:
        if "lora_magnitude_vector" in name:
            raise ValueError(
                f"the adapter {spec.name} holds {name}: DoRA is not served unmerged; train plain LoRA, or publish full weights"
            )
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight", name)
        if match is None:
            raise ValueError(
                f"the adapter {spec.name} holds {name}, which is not a LoRA matrix; publish those that peft names "
                f"{PREFIX}<module>.lora_A.weight and lora_B.weight, and nothing else"
            )
        names.append(match[1])
    pairs = {}
    for module in names:
        a, b = (tensors.get(f"{PREFIX}{module}.lora_{letter}.weight") for letter in "AB")
        if a is None or b is None:
            raise ValueError(f"the adapter {spec.name} holds one of lora_A and lora_B for {module}; publish both")
        pairs[module] = a, b
    return pairs


def _module(
    spec: AdapterSpec,
    module: str,
    shapes: Mapping[str, tuple[int, int, int]],
    there: str,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
) -> str:
    """The adapted module's canonical name. For experts, peft's names do not show which of the two parameters is meant (the one
    it wrapped first is called `base_layer`), but their sizes do."""
    plain = module.replace(".base_layer", "")
    if plain.endswith(".experts"):
        for name in (f"{plain}.gate_up_proj", f"{plain}.up_proj", f"{plain}.down_proj"):
            if name in shapes and shapes[name][1:] == (b.shape[0], a.shape[-1]):
                return name
    elif plain in shapes:
        return plain
    raise ValueError(
        f"the adapter {spec.name} adapts {module} with matrices of shape {tuple(a.shape)} and {tuple(b.shape)}, for which the "
        f"base model has no place ({there}); is it an adapter for another base model?"
    )


def _checked(spec: AdapterSpec, name: str, shape: tuple[int, int, int], a: torch.Tensor, b: torch.Tensor) -> Matrices:
    experts, out, into = shape
    rank = _of_pattern(spec.rank_pattern, name, spec.rank)
    for letter, tensor, wanted in (("A", a, (rank * experts, into)), ("B", b, (out, rank * experts))):
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"lora_{letter} of {name} in the adapter {spec.name} came with shape {tuple(tensor.shape)}, the base model and "
                f"rank {rank} take {wanted}; is it an adapter for another base model, or of another rank?"
            )
    alpha = _of_pattern(spec.alpha_pattern, name, spec.alpha)
    scale = alpha / (rank**0.5 if spec.rslora else rank)
    b = b.float().view(out, rank, experts).permute(2, 0, 1)  # peft counts experts fastest in B and slowest in A
    return Matrices(a.float().view(experts, rank, into), b * scale)


def _of_pattern(pattern: Mapping[str, Number], name: str, default: Number) -> Number:
    """Returns the value of the first key that matches, as peft does: a key is a regular expression for the end of the name."""
    keys = (key for key in pattern if re.match(rf"(.*\.)?({key})$", name))
    return next((pattern[key] for key in keys), default)


def _fused(parts: Sequence[tuple[tuple[int, int], Matrices | None]], dtype: torch.dtype, device: torch.device) -> Pair:
    """`parts`: (out, in) of each module of a product, and its matrices if it has some."""
    present = [pair for _, pair in parts if pair is not None]
    blocks = [torch.zeros(out, 0) if pair is None else pair.b[0].cpu() for (out, _), pair in parts]
    a = torch.cat([pair.a[0] for pair in present])
    return Pair(a.to(device, dtype), torch.block_diag(*blocks).to(device, dtype))
