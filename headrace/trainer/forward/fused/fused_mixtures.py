"""Mixtures of experts as autograd functions, with the engine's order of sums and its roundings; see `kernels/src/experts.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from headrace.native.memory import address
from headrace.trainer.forward.fused.fused_ops import PackedWeight, give, kernels, packed_now, served
from headrace.trainer.forward.fused.fused_products import LinearLayer, LowRankPair, input_gradient, weight_gradient
from headrace.trainer.kernels import binding

VECTOR = 16
"""The numbers that the kernels read at once."""


# -- the router -------------------------------------------------------------------------------------------------------------


def router_scores(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [N, H] times the transpose of the router [E, H], of factors in `dtype`: [N, E] float32."""
    return _Scores.apply(x.to(dtype), served(weight, dtype))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, scores = x.contiguous(), torch.empty(len(x), len(weight))
        router = pad(weight, (0, -x.shape[-1] % VECTOR)).contiguous()
        given = (address(x), *x.shape, address(router), len(weight), address(scores))
        kernels().headrace_router_scores(x.dtype == torch.float32, *given)
        ctx.save_for_backward(x, weight)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_scores, wide = d_scores.contiguous(), x.float()
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = input_gradient(torch.empty_like(wide), [(d_scores, packed_now(weight, torch.float32, down=True))])
            d_x = d_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            weight_gradient(wide, [d_scores], [d_weight], [False])
        return d_x, d_weight


def choice(scores: Tensor, chosen: int, normalised: bool, recorded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts with the highest scores [N, E], or the recorded ones [N, K], as ([N, K] their weights, [N, K] int64). The weights are a
    softmax over all experts, divided by its sum over the chosen ones if `normalised`."""
    return _Choice.apply(scores, chosen, normalised, recorded)


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, chosen: int, normalised: bool, recorded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, experts = scores.shape
        which = torch.empty(rows, chosen, dtype=torch.int64)
        if recorded is not None:
            which.copy_(recorded)
        scores, weights = scores.contiguous(), torch.empty(rows, chosen)
        given = (address(scores), rows, experts, chosen, normalised, recorded is not None)
        kernels().headrace_choose(*given, address(which), address(weights))
        ctx.save_for_backward(scores, weights, which)
        ctx.normalised = normalised
        ctx.mark_non_differentiable(which)
        return weights, which

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        scores, weights, which = ctx.saved_tensors
        along = (d_weights * weights).sum(-1, keepdim=True)
        if ctx.normalised:  # a softmax over the chosen scores
            d_scores = torch.zeros_like(scores).scatter_(1, which, weights * (d_weights - along))
        else:
            d_scores = (scores.softmax(-1) * -along).scatter_add_(1, which, weights * d_weights)
        return d_scores, None, None, None


# -- the experts ------------------------------------------------------------------------------------------------------------


class Stacks(NamedTuple):
    """The weights of a layer's experts."""

    gate_up: Tensor
    """[E, 2I, H]: the gates first."""
    down: Tensor
    """[E, H, I]"""
    packed: tuple[PackedWeight, PackedWeight]
    """One of 2E matrices, and one of E."""
    gelu: bool

    def operands(self, dtype: torch.dtype, backward: bool) -> list[Tensor]:
        """Both matrices as the kernels read them: in bfloat16 packed for one direction."""
        weights = (self.gate_up, self.down)
        if dtype == torch.bfloat16:
            return [packed.packed(weight)[backward] for packed, weight in zip(self.packed, weights, strict=True)]  # type: ignore[misc]
        return [weight.detach().float().contiguous() for weight in weights]


def experts(x: Tensor, weights: Tensor, which: Tensor, stacks: Stacks, dtype: torch.dtype) -> Tensor:
    """The sum over a row's experts `which` [N, K] of weight · down(act(gate(x)) · up(x)), from x [N, H] on in factors of `dtype`: [N, H]
    float32. The gradients of the experts' weights are not passed to autograd: they are added to their `.grad`."""
    return _Experts.apply(x.to(dtype), weights, which, stacks, stacks.gate_up, stacks.down)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, which: Tensor, stacks: Stacks, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        x, weights, which = x.contiguous(), weights.float().contiguous(), which.long().contiguous()
        kept = x.new_empty(3, which.numel(), down.shape[-1]).unbind()
        out, told = torch.empty(x.shape), torch.empty(which.numel(), x.shape[-1])
        held = stacks.operands(x.dtype, backward=False)
        mixture = _mixture(stacks, which, weights, operands=held, kept=kept, told=told)
        kernels().headrace_experts(x.dtype == torch.float32, ctypes.byref(mixture), address(x), address(out))
        ctx.save_for_backward(x, weights, which, *kept)
        ctx.stacks = stacks  # see `fused_products.Together`
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, which, *kept = ctx.saved_tensors
        stacks, needs = ctx.stacks, ctx.needs_input_grad[4:]
        low, by_x, by_weights = d_out.to(x.dtype).contiguous(), torch.empty_like(x), torch.empty_like(weights)
        told, held = torch.empty(len(kept[0]), x.shape[-1]), stacks.operands(x.dtype, backward=True)
        mixture = _mixture(stacks, which, weights, operands=held, kept=kept, told=told)
        matrices = (stacks.gate_up, stacks.down)
        into = [
            packed.gradient(weight) if need else (None, False)
            for packed, weight, need in zip(stacks.packed, matrices, needs, strict=True)
        ]
        (mixture.by_gate_up, mixture.add_gate_up), (mixture.by_down, mixture.add_down) = (
            (address(gradient), add) for gradient, add in into
        )
        given = map(address, (x, low, by_x, by_weights))
        kernels().headrace_experts_backward(x.dtype == torch.float32, ctypes.byref(mixture), *given)
        for weight, (gradient, add) in zip(matrices, into, strict=True):
            if gradient is not None and not add:
                give(weight, gradient)
        return by_x, by_weights, None, None, None, None


def _mixture(
    stacks: Stacks,
    which: Tensor,
    weights: Tensor,
    *,
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
    told: Tensor,
) -> binding.MixtureStruct:
    count, hidden, inner = stacks.down.shape
    sizes = {"rows": len(which), "hidden": hidden, "inner": inner, "experts": count, "chosen": which.shape[1]}
    gate_up, down = map(address, operands)
    gate, up, y = map(address, kept)
    given = {
        "which": address(which),
        "weights": address(weights),
        "gate_up": gate_up,
        "down": down,
        "told": address(told),
    }
    return binding.MixtureStruct(**sizes, **given, gate=gate, up=up, y=y, gelu=stacks.gelu)


# --- A module of a model as the kernels know it
# A linear layer, alone or with one of peft's adapters; an activation.


def factors() -> torch.dtype:
    """The dtype of the factors of products: what autocast asks for."""
    low = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return torch.bfloat16 if low else torch.float32


def is_gelu(function: Any) -> bool | None:
    """Whether the function is GELU's tanh form, or SiLU; None if neither."""
    x = torch.linspace(-6, 6, 97)
    for gelu, known in ((False, nn.functional.silu(x)), (True, nn.functional.gelu(x, approximate="tanh"))):
        if callable(function) and torch.allclose(function(x), known, rtol=1e-5, atol=1e-6):
            return gelu
    return None


def layer_of(module: Any) -> LinearLayer | None:
    """The linear layer that is all that a module computes, with what its active adapter adds; None for any other module.

    `packed` marks the modules whose products are to go through the kernels.
    """
    base = getattr(module, "base_layer", module)
    if type(base) is not nn.Linear or not hasattr(base, "packed"):
        return None
    packed: Any = base.packed
    layer = LinearLayer(packed, base.weight, base.bias)
    if base is module:
        return layer
    if not hasattr(module, "lora_variant") or module.merged:
        return None
    names = [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return layer
    return layer._replace(low_rank=_low_rank(module, names[0])) if _is_plain(module, names) else None


def _is_plain(module: Any, names: list[str]) -> bool:
    """Whether one adapter is active, and is two matrices and a factor: no DoRA, no dropout, no bias."""
    name, *others = names
    return (
        not others
        and name not in module.lora_variant
        and type(module.lora_dropout[name]) is nn.Identity
        and module.lora_B[name].bias is None
    )


def _low_rank(module: Any, name: str) -> LowRankPair:
    return LowRankPair(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])


# --- A model's routers and experts as the kernels know them, by their parts and a trial.


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


def is_fused_router(module: Any) -> bool:
    """Whether the module is a router that runs through the kernels."""
    return isinstance(getattr(module, "fused", None), RouterSpec) and "forward" in vars(module)


@contextmanager
def unfused_routers(model: Any) -> Iterator[None]:
    """Routers compute as their classes do while it is open."""
    fused = [(module, vars(module).pop("forward")) for module in model.modules() if is_fused_router(module)]
    try:
        yield
    finally:
        for module, forward in fused:
            module.forward = forward


def weights_of(module: Any, scores: Tensor, experts: Tensor) -> Tensor:
    """The weights that a router which runs through the kernels gives these experts [N, K], as the engine computes them."""
    return choice(scores, experts.shape[1], module.fused.normalised, experts)[0]


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
    scores = router_scores(x, weight, factors())
    return scores, *choice(scores, chosen, normalised)


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
    actual = experts(x, weights, which, Stacks(gate_up, down, packed, gelu), torch.float32)
    expected = module(x, which, weights)
    return gelu if (actual - expected).norm() <= 1e-4 * expected.norm() else None


def _mix(module: Any, x: Tensor, which: Tensor, weights: Tensor) -> Tensor:
    if module._parameters.keys() < STACKS:  # peft computes them anew at every use
        mixed: Tensor = type(module).forward(module, x, which, weights)
        return mixed
    packed = module.packed_stacks["gate_up_proj"], module.packed_stacks["down_proj"]
    stacks = Stacks(module.gate_up_proj, module.down_proj, packed, module.gelu)
    return experts(x, weights, which, stacks, factors())


def _numbers(rows: int, width: int) -> Tensor:
    return (torch.arange(rows * width) * 0.7391).sin().view(rows, width)
