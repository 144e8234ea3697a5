"""Buffers that a model saves beside its parameters, and that are weights all but in name: biases with which experts are chosen, constants
of an activation."""

from __future__ import annotations

import torch


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns them by their names in `state_dict`, in its order. What a model computes again when it is made (rotary frequencies) is not saved,
    and not among them. They are published, fingerprinted, checkpointed and exported with the parameters, but in their own dtype, and no
    optimizer moves them."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters}
