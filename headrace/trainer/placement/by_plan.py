"""The layers of a model, split over ranks by the model's own tensor-parallel plan, which transformers applies (arXiv 1909.08053).

Each rank holds some heads of every attention, some columns of every MLP and some rows of the vocabulary, and computes with them alone.
All ranks forward the same tokens, and add up hidden states (after attention and MLP) and their gradients (before them) in all-reduces.
What the plan does not name, such as norms and routers, every rank holds whole and computes with alike.

Gradients of norms of heads (Qwen3's q_norm and k_norm) cover a rank's own heads only. transformers 5.23 sums them over ranks by a hook
that runs after every backward pass, on the gradient accumulated so far: it counts the first of two microbatches twice, and of seven 64
times. The hook is not installed here; the placement sums these gradients once a step. Of adapters beside split layers, some gradients
are summed so too (`model/split_adapters.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from headrace.core.errors import ConfigError
from headrace.trainer.model.split_adapters import BASE, split_adapters

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
    plan = model._expand_parallel_plan(rules)
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
