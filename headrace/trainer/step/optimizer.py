"""One update with a clipped gradient."""

from __future__ import annotations

import torch

from headrace.trainer.placement.port import Placement


def apply(
    optimizer: torch.optim.Optimizer, placement: Placement, *, lr: float, max_norm: float, unless_zero: bool = False
) -> float:
    """Makes one update with the gradient scaled down to `max_norm`. Returns the norm before that.

    A norm that is not finite updates nothing, and neither does one of 0 under `unless_zero`. The gradients are cleared in either case.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = placement.norm(parameters)
    if torch.isfinite(norm) and not (unless_zero and norm == 0):
        if norm > max_norm:
            placement.clip(parameters, norm, max_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        torch.autograd.graph.increment_version(parameters)  # the fused step forgets to, and packed copies go by it
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
