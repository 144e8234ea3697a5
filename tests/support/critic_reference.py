"""The value loss of a critic with a model of its own, in float64 through transformers' model, and a batch of which its targets are simple."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.core.batches import Batch, Group
from headrace.core.types import Prompt
from support import plain_trainer


def batch(step: int) -> Batch:
    """Rollouts with a reward of 0 or 1 at their last token, by turns."""
    rows = [
        replace(row, advantages=(0.0,) * (len(row.tokens) - 1) + (float(number % 2),), turns=(0,))
        for number, row in enumerate(plain_trainer.rows(random.Random(step), ((5, 3), (3, 2))))
    ]
    return Batch(step, (Group(0, Prompt("p", "", (1,)), (), tuple(rows)),))


def begun(weight: Tensor, bias: Tensor) -> None:
    """Moves a head from 0, where its model has no gradient."""
    generator = torch.Generator().manual_seed(3)
    weight.data.copy_(torch.randn(weight.shape, generator=generator))
    bias.data += 0.5


def gradients(own_model: Path, given: Batch, head: Tensor, offset: Tensor) -> dict[str, Tensor]:
    """The gradients of the value loss of `batch`, by the names of a `CriticModel`'s parameters. With λ = 1 and γ = 1 the target of every token is its
    rollout's reward. Each row goes through the model by itself."""
    model = AutoModelForCausalLM.from_pretrained(own_model, dtype=torch.float64, attn_implementation="eager").eval()
    weight, bias = (tensor.detach().double().requires_grad_() for tensor in (head, offset))
    errors = []
    for number, row in enumerate(given.rows):
        states = model.base_model(torch.tensor([row.prompt + row.tokens])).last_hidden_state[0]
        places = [len(row.prompt) + place - 1 for place, counts in enumerate(row.mask) if counts]
        own = states[places]
        value = (own / own.norm(dim=1, keepdim=True) / own.shape[1] ** 0.5) @ weight + bias
        errors.append((value - number % 2) ** 2 / 2)
    torch.cat(errors).mean().backward()
    found = {"weight": weight.grad, "bias": bias.grad}
    found |= {f"trunk.{name}": tensor.grad for name, tensor in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}
