"""The experts of a mixture, split over ranks by transformers' expert parallelism: each rank holds some of the experts of every layer whole.

Tokens travel to the ranks of their experts and back (two all-to-all a layer, and two in the backward pass); the experts' weights are never
gathered, and the gradient that a rank has of them is already the sum over all ranks' tokens. Routers stay with the layers: they choose
among all experts, live or as recorded.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from headrace.core.errors import ConfigError
from headrace.trainer.placement.by_plan import release


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
    plan = model._expand_parallel_plan(model.ep_plan) if getattr(model, "ep_plan", None) else {}
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
