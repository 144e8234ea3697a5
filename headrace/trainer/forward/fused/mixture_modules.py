"""A model's routers and experts as the kernels know them, by their parts and a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.trainer.forward.fused import fused_mixtures
from headrace.trainer.forward.fused.fused_mixtures import Stacks
from headrace.trainer.forward.fused.fused_weights import PackedWeight
from headrace.trainer.forward.fused.module_layers import factors, is_gelu

T = TypeVar("T")
STACKS = {"gate_up_proj", "down_proj"}
TRIED = 5
"""Rows of a trial."""


@dataclass(frozen=True)
class RouterSpec:
    normalised: bool
    """Whether the weights of the chosen experts are divided by their sum."""


def is_router(module: Any) -> bool:
    """transformers gives router modules `top_k` and `num_experts`."""
    facts = vars(module)
    known = isinstance(facts.get("top_k"), int) and isinstance(facts.get("num_experts"), int)
    return known and "weight" in module._parameters


@torch.no_grad()
def fuse_mixtures(model: Any) -> list[Any]:
    """Gives the routers and the experts that are known another `forward`. Returns these modules."""
    found: list[Any] = []
    for module in model.modules():
        if is_router(module) and (router := _tried(_router_spec, module)) is not None:
            module.fused = router
            module.forward = MethodType(_route, module)
            found.append(module)
        elif module._parameters.keys() == STACKS and (gelu := _tried(_gelu_of, module)) is not None:
            module.gelu, count = gelu, len(module.down_proj)
            module.packed_stacks = {"gate_up_proj": PackedWeight(2 * count), "down_proj": PackedWeight(count)}
            module.forward = MethodType(_mix, module)
            found.append(module)
    return found


def _tried(trial: Callable[[Any], T | None], module: Any) -> T | None:
    """Returns the result of the trial; None for a module that wants other values than those of known families."""
    try:
        return trial(module)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return None


@contextmanager
def same_experts(model: Any) -> Iterator[None]:
    """Makes whole passes of the model over the same tokens go to the experts of the first pass. Where two experts nearly tie,
    rounding chooses between them, and hidden states of a deep mixture would differ by far more than it. Weights stay those of the pass."""
    chosen: dict[Any, Tensor] = {}

    def hook(module: Any, _: Any, output: Any) -> Any:
        if not isinstance(output, tuple) or len(output) != 3:
            return output  # a router of another kind
        first = chosen.setdefault(module, output[2].detach())
        return (
            (*output[:2], first) if first.shape == output[2].shape else output
        )  # other tokens: a trial of the module alone

    with ExitStack() as hooks:
        for module in model.modules():
            if is_router(module):
                hooks.callback(module.register_forward_hook(hook).remove)
        yield


def weights_of(module: Any, scores: Tensor, experts: Tensor) -> Tensor | None:
    """The weights that a router gives these experts [N, K], as the engine computes them; None if it does not run through the kernels."""
    if not isinstance(getattr(module, "fused", None), RouterSpec) or "forward" not in vars(module):
        return None
    return fused_mixtures.choice(scores, experts.shape[1], module.fused.normalised, experts)[0]


# -- routers ----------------------------------------------------------------------------------------------------------------


def _router_spec(module: Any) -> RouterSpec | None:
    if [*module._parameters] != ["weight"] or module.weight.ndim != 2:
        return None
    x = _numbers(TRIED, module.weight.shape[1])
    expected = module(x)
    if not isinstance(expected, tuple) or len(expected) != 3 or expected[2].shape != (TRIED, module.top_k):
        return None
    for normalised in (False, True):
        pairs = zip(_found(*_routed(x, module.weight, module.top_k, normalised)), _found(*expected), strict=True)
        if all(a.shape == e.shape and torch.allclose(a, e.float(), 1e-4, 1e-5) for a, e in pairs):
            return RouterSpec(normalised)
    return None


def _found(scores: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a router does, with the scores of the experts in their place: two that nearly tie may be exchanged."""
    return scores, weights, scores.gather(1, experts)


def _route(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _routed(x.reshape(-1, x.shape[-1]), module.weight, module.top_k, module.fused.normalised)


def _routed(x: Tensor, weight: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, weights, experts), as transformers' routers return them."""
    scores = fused_mixtures.router_scores(x, weight, factors())
    return scores, *fused_mixtures.choice(scores, chosen, normalised)


# -- experts ----------------------------------------------------------------------------------------------------------------


def _gelu_of(module: Any) -> bool | None:
    """Whether the experts' activation is GELU's tanh form, or SiLU; None for experts of another kind."""
    gate_up, down = module.gate_up_proj, module.down_proj
    gelu = is_gelu(getattr(module, "act_fn", None))
    if gelu is None or gate_up.ndim != 3 or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return None
    count = len(down)
    x, weights = _numbers(TRIED, down.shape[1]), torch.linspace(0.2, 1, 2 * TRIED).view(TRIED, 2)
    which = torch.arange(2 * TRIED).view(TRIED, 2) % count
    packed = PackedWeight(2 * count), PackedWeight(count)
    actual = fused_mixtures.experts(x, weights, which, Stacks(gate_up, down, packed, gelu), torch.float32)
    expected = module(x, which, weights)
    return gelu if (actual - expected).norm() <= 1e-4 * expected.norm() else None


def _mix(module: Any, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
    if module._parameters.keys() < STACKS:  # peft computes them anew at every use
        mixed: Tensor = type(module).forward(module, x, which, weights)
        return mixed
    packed = module.packed_stacks["gate_up_proj"], module.packed_stacks["down_proj"]
    stacks = Stacks(module.gate_up_proj, module.down_proj, packed, module.gelu)
    return fused_mixtures.experts(x, weights, which, stacks, factors())


def _numbers(rows: int, width: int) -> Tensor:
    return (torch.arange(rows * width) * 0.7391).sin().view(rows, width)
