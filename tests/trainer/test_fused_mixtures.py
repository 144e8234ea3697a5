"""Mixtures of experts through the kernels: scores, choices and experts against float64, with their gradients."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from test_fused_training import BF16, F32, ROUNDING, check, distance, gradients, pair
from torch import Tensor
from torch.nn import functional

from headrace.trainer.forward.forward import choose_forward
from headrace.trainer.forward.fused import fused_mixtures
from headrace.trainer.forward.fused.fused_mixtures import Stacks
from headrace.trainer.forward.fused.fused_ops import PackedWeight
from headrace.trainer.forward.fused_model import fuse
from headrace.trainer.kernels import binding
from support import tiny_models

pytestmark = [
    pytest.mark.skipif(binding.library() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("seeded"),
]


# --- the router --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows, width, experts", [(37, 64, 8), (50, 33, 5), (1, 16, 2)])
def test_scores(rows, width, experts, dtype):
    x, router = torch.randn(rows, width).to(dtype), torch.randn(experts, width).to(dtype).float()
    check(lambda x, r: fused_mixtures.router_scores(x, r, dtype), functional.linear, [x, router], dtype)
    exact = functional.linear(x.double(), router.double())
    assert distance(fused_mixtures.router_scores(x, router, dtype), exact) < ROUNDING[F32], "they are never rounded"


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("experts, chosen", [(8, 2), (5, 5), (60, 4), (3, 1)])
def test_choice(experts, chosen, normalised, recorded):
    scores = 2 * torch.randn(40, experts)
    best = scores.topk(chosen).indices
    which = torch.rand(40, experts).argsort(-1)[:, :chosen] if recorded else best

    def plain(scores):
        weights = scores.softmax(-1).gather(1, which)
        return weights / weights.sum(-1, keepdim=True) if normalised else weights

    given = which if recorded else None
    check(lambda s: fused_mixtures.choice(s, chosen, normalised, given)[0], plain, [scores], F32)
    assert torch.equal(fused_mixtures.choice(scores, chosen, normalised, given)[1], which)


def test_recorded_weights_are_those_of_the_choice_to_the_last_bit():
    scores = torch.randn(200, 16)
    weights, which = fused_mixtures.choice(scores, 4, True)
    assert torch.equal(fused_mixtures.choice(scores, 4, True, which)[0], weights)


def test_the_first_of_equal_experts_is_chosen():
    assert fused_mixtures.choice(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2, True)[1].tolist() == [[1, 2]]


# --- experts -----------------------------------------------------------------------------------------------------------


def stacks_of(gate_up: Tensor, down: Tensor, gelu: bool = False) -> Stacks:
    return Stacks(gate_up, down, (PackedWeight(2 * len(down)), PackedWeight(len(down))), gelu)


def plain_experts(x: Tensor, weights: Tensor, which: Tensor, gate_up: Tensor, down: Tensor, gelu: bool) -> Tensor:
    inner = down.shape[-1]
    hidden = torch.einsum("nh,nkih->nki", x, gate_up[which])
    gate, up = hidden.split(inner, -1)
    acted = (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up
    return (torch.einsum("nki,nkhi->nkh", acted, down[which]) * weights[..., None]).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "rows, hidden, inner, experts, chosen, gelu",
    [
        (37, 64, 96, 4, 2, False),
        (50, 33, 41, 5, 3, True),
        (3, 40, 32, 7, 1, False),  # most experts have no rows
        (700, 48, 1056, 2, 1, False),  # sums in several pieces
        (90, 64, 32, 40, 8, False),  # so many that each is computed by one thread
    ],
)
def test_experts(rows, hidden, inner, experts, chosen, gelu, dtype):
    """What is rounded to bfloat16 is the operands of products: in the forward pass the activations, in the backward pass their
    gradients too."""
    which = torch.rand(rows, experts).argsort(-1)[:, :chosen]
    x, weights = torch.randn(rows, hidden).to(dtype), torch.rand(rows, chosen) + 0.1
    gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).bfloat16().float()
    down = (torch.randn(experts, hidden, inner) / inner**0.5).bfloat16().float()
    torch.set_num_threads(2)

    def fused(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return fused_mixtures.experts(x, weights, which, stacks_of(gate_up, down, gelu), dtype)

    def plain(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return plain_experts(x, weights, which, gate_up, down, gelu)

    check(fused, plain, [x, weights, gate_up, down], dtype)


def test_gradients_of_experts_add_up_and_are_zero_where_nobody_went():
    gate_up, down = (torch.randn(*shape, requires_grad=True) for shape in ((3, 64, 32), (3, 32, 32)))
    stacks, which = stacks_of(gate_up, down), torch.tensor([[0], [2], [0]])
    x, weights = torch.randn(3, 32), torch.ones(3, 1)
    found = []
    for _ in range(2):
        fused_mixtures.experts(x, weights, which, stacks, F32).sum().backward()
        found.append((gate_up.grad.clone(), down.grad.clone()))
    assert all(torch.allclose(twice, 2 * once) for once, twice in zip(*found, strict=True))
    for grad in found[0]:
        assert grad[0].any() and not grad[1].any() and grad[2].any()


def test_frozen_experts_get_no_gradient_and_pass_on_that_of_their_input():
    gate_up, down = torch.randn(3, 64, 32), torch.randn(3, 32, 32)
    x, weights = torch.randn(4, 32, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    which = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]])
    fused_mixtures.experts(x, weights, which, stacks_of(gate_up, down), BF16).sum().backward()
    assert gate_up.grad is None and down.grad is None and x.grad.any() and weights.grad.any()


# --- whole models ------------------------------------------------------------------------------------------------------


def test_adapters_of_experts_are_computed_by_the_model_itself():
    """peft computes the experts' weights anew at every use: their gradients pass through autograd."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], init_lora_weights=False
    )
    own, own_forward, mine, my_forward, _ = pair("mixtral")
    for model in (own, mine):
        torch.manual_seed(3)
        peft.get_peft_model(model, config)
    expected, actual = gradients(own, own_forward, F32), gradients(mine, my_forward, F32)
    assert actual.keys() == expected.keys() and any("experts.lora_A" in key for key in actual)
    assert all(distance(actual[key], expected[key]) < 1e-5 for key in expected)


@pytest.mark.parametrize("spoiled", ["router", "experts"])
def test_what_a_mixture_does_besides_is_not_lost(spoiled: str):
    """A router that chooses by something else, and experts that scale what they give: they keep their own forward pass."""
    own = tiny_models.reference("mixtral")
    module: Any = own.model.layers[0].mlp.gate if spoiled == "router" else own.model.layers[0].mlp.experts

    class Changed(type(module)):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Tensor) -> Any:
            return (
                super().forward(2 * x if spoiled == "router" else x, *args)
                if spoiled == "router"
                else 0.5 * super().forward(x, *args)
            )

    mine = deepcopy(own)
    for model in (own, mine):
        mlp = model.model.layers[0].mlp
        (mlp.gate if spoiled == "router" else mlp.experts).__class__ = Changed
    own_forward, my_forward = choose_forward(own), choose_forward(mine)
    assert "mixtures" in fuse(my_forward)
    expected, actual = gradients(own, own_forward, F32), gradients(mine, my_forward, F32)
    assert all(distance(actual[key], expected[key]) < 1e-5 for key in expected)


def test_experts_that_tie_do_not_speak_against_the_kernels():
    """Two experts nearly tie for the second place, and rounding chooses: the trial goes to those of the model's own pass."""
    own = tiny_models.reference("mixtral")
    with torch.no_grad():
        for layer in own.model.layers:
            router = layer.mlp.gate.weight
            router[1], router[2], router[3] = router[0] * (1 + 1e-7), 2 * router[0], -2 * router[0]
    mine = deepcopy(own)
    assert "mixtures" in fuse(choose_forward(mine))
    assert not any(module._forward_hooks for module in mine.modules())
