"""Layers that several ranks compute together: by the model's own tensor-parallel plan, with their adapters, and experts by theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

from headrace.core.errors import ConfigError
from headrace.trainer.model.low_memory import local

# --- Adapters (LoRA, DoRA) of linear layers that several ranks compute together.
#
# An adapter is small: every rank holds its A and B whole, and computes with the part of them that fits its part of the layer.
#
#     layer split by results    every rank has all of x and makes some of the results: with its rows of B. The gradient of A x is summed over ranks
#     layer split by inputs     every rank has some of x and adds to all results: with its columns of A. A x is summed over ranks
#
# So what travels has the adapter's rank in numbers a token, not the width of the layer. peft would add B(A(x)), as wide as the whole layer,
# to a rank's part of it. The gradient of what was used in parts (first case: B and DoRA's lengths; second: A) covers these parts, and has to be summed
# over the ranks once a step; all other gradients are whole, and the same on every rank.


BASE = "base_layer"
"""The name that peft gives to the layer within an adapter's."""

WHOLE = {"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "replicate"}
"""Styles of transformers' plans whose layers take and return the whole: peft's own forward is right."""


def split_adapters(model: Any, styles: Mapping[str, str], group: dist.ProcessGroup) -> list[str]:
    """Makes adapters compute beside layers that are split over `group`. `styles`: how each adapted layer is split. Returns the names of the
    parameters whose gradients have to be summed over the group. Raises ConfigError for a layer that is split in another way."""
    summed: list[str] = []
    for name, style in styles.items():
        if style in WHOLE:
            continue
        if style not in ("colwise", "rowwise"):
            raise ConfigError(
                f"lora.targets has {name.rpartition('.')[2]}, which the plan of {type(model).__name__} splits over ranks as {style}, and an adapter "
                "beside that is not there; leave it out of lora.targets, or use train.parallel.shard instead of tensor"
            )
        layer = model.get_submodule(name)
        layer.forward = _forward_of(layer, _by_results if style == "colwise" else _by_inputs, group)
        parts = ("lora_B.", "lora_magnitude_vector.") if style == "colwise" else ("lora_A.",)
        summed += [f"{name}.{own}" for own, _ in layer.named_parameters() if own.startswith(parts)]
    return summed


Product = Callable[[Any, str, Tensor, dist.ProcessGroup], tuple[Tensor, Tensor, Tensor | None]]
"""(layer, adapter, x, group) -> x A^T B^T of this rank's results [..., n]; and for DoRA, without gradient, the length of each row of W + BA [n], and with
gradient, the lengths that are trained [n]."""


def _forward_of(layer: Any, product: Product, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of an adapted layer, as peft's, of this rank's part."""

    def forward(x: Tensor) -> Tensor:
        result: Tensor = layer.base_layer(x)
        if layer.disable_adapters:
            return result
        dtype = result.dtype
        for name in layer.active_adapters:
            if name not in layer.lora_A:
                continue
            added, length, trained = product(layer, name, x.to(layer.lora_A[name].weight.dtype), group)
            added = added * layer.scaling[name]
            if trained is None:
                result = result + added
                continue
            bias, scale = layer.base_layer.bias, trained / length
            product_alone = result if bias is None else result - local(bias)
            result = result + (scale - 1) * product_alone + scale * added
        return result.to(dtype)

    return forward


def _by_results(layer: Any, name: str, x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b, weight = layer.lora_A[name].weight, layer.lora_B[name].weight, local(layer.base_layer.weight)
    start, count = dist.get_rank(group) * len(weight), len(weight)
    rows = b.narrow(0, start, count)
    added = linear(_SumGradients.apply(linear(x, a), group), rows)
    if not layer.use_dora[name]:
        return added, added, None
    with torch.no_grad():
        length = _moved(weight.to(x.dtype), rows, a, layer.scaling[name]).norm(dim=1)
    return added, length, layer.lora_magnitude_vector[name].weight.narrow(0, start, count)


def _by_inputs(layer: Any, name: str, x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b, weight = layer.lora_A[name].weight, layer.lora_B[name].weight, local(layer.base_layer.weight)
    count = weight.shape[1]
    columns = a.narrow(1, dist.get_rank(group) * count, count)
    added = linear(_Sum.apply(linear(x, columns), group), b)
    if not layer.use_dora[name]:
        return added, added, None
    with torch.no_grad():
        squares = _moved(weight.to(x.dtype), b, columns, layer.scaling[name]).square().sum(dim=1)
        dist.all_reduce(squares, group=group)
    return added, squares.sqrt(), layer.lora_magnitude_vector[name].weight


def _moved(weight: Tensor, b: Tensor, a: Tensor, scaling: float) -> Tensor:
    """This rank's part of W + BA. DoRA (arXiv 2402.09353, 4.3) takes its lengths for constants."""
    return weight + scaling * (b @ a).to(weight.dtype)


class _Sum(torch.autograd.Function):
    """Summed over ranks; the gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _SumGradients(torch.autograd.Function):
    """A value that is the same on all ranks, whose gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        summed = gradient.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


# --- The layers of a model
# The layers of a model, split over ranks by the model's own tensor-parallel plan, which transformers applies (arXiv 1909.08053).
#
# Each rank holds some heads of every attention, some columns of every MLP and some rows of the vocabulary, and computes with them alone.
# All ranks forward the same tokens, and add up hidden states (after attention and MLP) and their gradients (before them) in all-reduces.
# What the plan does not name, such as norms and routers, every rank holds whole and computes with alike.
#
# Gradients of norms of heads (Qwen3's q_norm and k_norm) cover a rank's own heads only. transformers 5.23 sums them over ranks by a hook
# that runs after every backward pass, on the gradient accumulated so far: it counts the first of two microbatches twice, and of seven 64
# times. The hook is not installed here; the placement sums these gradients once a step. Of adapters beside split layers, some gradients
# are summed so too (`placement/tensor_parallel.py`).


SUMMED = "replicated_with_grad_allreduce"
"""transformers' style of a module whose weights are whole on every rank, and their gradients are not."""


def split_by_plan(model: Any, ranks: DeviceMesh, *, without: set[str]) -> list[str]:
    """Splits the model over `ranks`, except for the modules and parameters named in `without`. Returns the names of the parameters whose
    gradients have to be summed over `ranks`.

    Parameters that are split are other objects afterwards. Raises ConfigError if the model has no plan, or cannot be split equally.
    """
    asked, kind = f"train.parallel.tensor = {ranks.size()}", type(model).__name__
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        raise ConfigError(f"{asked} needs transformers >= 5.23; install it, or use train.parallel.shard") from None
    if not getattr(model, "tp_plan", None):
        raise ConfigError(
            f"{asked}, and transformers has no tensor-parallel plan for {kind}; use train.parallel.shard instead"
        )
    plan, adapted = _plan_of(model)
    _check_heads(model, plan, ranks.size())
    plan = {name: style for name, style in plan.items() if name not in without and name not in adapted}
    names = _names(model)
    for shared in names:
        _keep_one(plan, shared, f"{asked}, and {kind} shares {' and '.join(shared)}, which its plan splits differently")
    parameters = dict(model.named_parameters())
    summed = [name for name, style in plan.items() if style == SUMMED and name in parameters]
    for name, style in plan.items():  # one by one, so that a device never holds the whole model
        if style != SUMMED:
            apply_tensor_parallelism(model, ranks, {name: style})
        if name in parameters:
            release(model.get_parameter(name), name, asked)
    for first, *others in names:
        for name in others:
            module, _, own = name.rpartition(".")
            model.get_submodule(module).register_parameter(own, model.get_parameter(first))
    return summed + split_adapters(model, adapted, ranks.get_group())


def _plan_of(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the style of every module and parameter that the model's plan names; and those of modules that are adapted: peft puts a layer
    of its own in their place, and the module within it."""
    rules = model.tp_plan | {f"{name}.{BASE}": style for name, style in model.tp_plan.items()}
    gone = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Identity)}  # a critic's head
    plan = {name: style for name, style in model._expand_parallel_plan(rules).items() if name not in gone}
    return plan, {name: style for name, style in plan.items() if f"{name}.{BASE}" in plan}


def _names(model: torch.nn.Module) -> list[list[str]]:
    """The names of every parameter: several, if it is tied."""
    found = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[parameter].append(name)
    return list(found.values())


def _check_heads(model: Any, plan: Mapping[str, str], ranks: int) -> None:
    """Raises ConfigError if heads would be cut in two."""
    if not any(name.endswith("k_proj") and style == "colwise" for name, style in plan.items()):
        return  # every rank sees all heads
    config = model.config.get_text_config()
    for setting in ("num_attention_heads", "num_key_value_heads"):
        found = getattr(config, setting, None) or ()
        for heads in (found,) if isinstance(found, int) else found:
            if heads % ranks:
                raise ConfigError(
                    f"train.parallel.tensor = {ranks} does not divide the model's {setting} = {heads}; choose a divisor for it, and split "
                    "further by train.parallel.shard"
                )


def _keep_one(plan: dict[str, str], shared: list[str], problem: str) -> None:
    """Leaves one entry of a tied parameter in the plan. Raises ConfigError unless all split it by rows, or none does."""
    by_rows = [plan.pop(name, "").startswith(("embedding_rowwise", "colwise")) for name in shared[1:]]
    if by_rows and set(by_rows) != {plan.get(shared[0], "").startswith(("embedding_rowwise", "colwise"))}:
        raise ConfigError(f"{problem}; use train.parallel.shard instead")


def release(parameter: Any, name: str, asked: str) -> None:
    """Frees the whole of which this rank's part is a view, and cuts gradients to this part. Raises ConfigError if other ranks have larger or
    smaller parts."""
    if not hasattr(parameter, "to_local"):
        return
    part, ranks = parameter.to_local(), parameter.device_mesh.size()
    if part.numel() * ranks != parameter.numel() and not parameter.placements[0].is_replicate():
        raise ConfigError(
            f"{asked} does not divide {name} {list(parameter.shape)}; choose a divisor for it, and split further by train.parallel.shard"
        )
    if parameter.ndim == 3 and part.shape[-1] * part.element_size() % 16:
        raise ConfigError(
            f"{asked} leaves {part.shape[-1]} columns of {name}, and torch multiplies experts in multiples of 16 bytes; choose a smaller "
            "divisor, or split experts whole (train.parallel.expert)"
        )
    parameter._local_tensor = part.detach().clone()
    # torch 2.13 returns the whole gradient of an embedding on every rank (FSDP2 cuts it too)
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: gradient.redistribute(placements=parameter.placements))


# --- The experts of a mixture
# The experts of a mixture, split over ranks by transformers' expert parallelism: each rank holds some of the experts of every layer whole.
#
# Tokens travel to the ranks of their experts and back (two all-to-all a layer, and two in the backward pass); the experts' weights are never
# gathered, and the gradient that a rank has of them is already the sum over all ranks' tokens. Routers stay with the layers: they choose
# among all experts, live or as recorded.


def split_experts(model: Any, ranks: DeviceMesh, alike: DeviceMesh) -> set[str]:
    """Splits the experts of a model over `ranks`. Returns the names of their modules and parameters, which are other objects now.

    `alike`: the ranks that have the same tokens, this one included; each sends a part of them. Raises ConfigError if the model has no
    experts, or cannot be split.
    """
    asked = f"train.parallel.expert = {ranks.size()}"
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:
        raise ConfigError(f"{asked} needs transformers >= 5.23; install it, or remove train.parallel.expert") from None
    plan = _plan_of_experts(model)
    weights = [name for name, style in plan.items() if style == "grouped_gemm"]
    if not weights:
        raise ConfigError(f"{asked}, and {type(model).__name__} has no experts that can be split; remove it")
    for name in weights:
        if (count := model.get_parameter(name).shape[0]) % ranks.size():
            raise ConfigError(
                f"{asked} does not divide the {count} experts of {name}; choose a divisor for it, shard and tensor"
            )
    apply_expert_parallelism(model, ranks, alike, plan, "all_to_all")
    for name in weights:
        release(model.get_parameter(name), name, asked)
    return set(plan)


def has_experts(model: Any) -> bool:
    """Whether the model has experts that can be split."""
    return "grouped_gemm" in _plan_of_experts(model).values()


def _plan_of_experts(model: Any) -> dict[str, str]:
    return model._expand_parallel_plan(model.ep_plan) if getattr(model, "ep_plan", None) else {}
