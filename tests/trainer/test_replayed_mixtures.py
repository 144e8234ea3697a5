"""Recorded experts in every mixture that transformers has: the same ones give the same numbers and gradients bit for bit, others other numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.testing.small_models import small_config, small_model
from headrace.trainer.forward.forward import Forward, choose_forward
from headrace.trainer.forward.routing import RoutingReplay
from headrace.trainer.packing import Pack, pack_sequence
from support.few import few
from support.model_page import model_types

MIXTURES = [name for name, row in model_types().items() if row.experts == "replayed"]
QUICK = ("deepseek_v3", "gpt_oss", "llama4_text", "phimoe", "zaya")
"""Biased and grouped sigmoids, a softmax over the chosen, a dense mixture, a choice by two calls of `max`, and one with an expert that skips."""
PLANTED = 9


def test_the_page_has_the_mixtures():
    assert len(MIXTURES) > 50 and set(QUICK) <= set(MIXTURES)


@pytest.mark.parametrize(
    "name", few([pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in MIXTURES], keep=2)
)
def test_recorded_experts_give_the_numbers_of_a_plain_pass_and_others_give_others(name):
    assert_replayed(small_model(name))


def test_a_gemma_4_with_experts_is_replayed():
    config = small_config("gemma4_text")
    config.enable_moe_block, config.num_experts, config.top_k_experts, config.moe_intermediate_size = True, 8, 2, 32
    assert_replayed(small_model("gemma4_text", config=config))


def test_an_expert_of_a_group_that_the_live_router_leaves_out_keeps_its_weight():
    """DeepSeek-V2 sets the scores of other groups to 0 before it chooses, and takes the weights from these scores."""
    config = small_config("deepseek_v2")
    config.topk_method, config.n_group, config.topk_group = "group_limited_greedy", config.n_routed_experts // 2, 1
    model = small_model("deepseek_v2", config=config)
    replay = RoutingReplay(choose_forward(model), torch.float32)
    router = replay._routers.modules[0][0]
    hidden = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0))
    scores = router(hidden)[0].float().softmax(-1)
    for expert in range(0, config.n_routed_experts, 2):
        experts = torch.tensor([[expert, expert + 1]]).expand(9, -1)
        with replay._routers.asked(lambda layer, column, live, experts=experts: experts):
            _, weights, chosen = router(hidden)
        assert torch.equal(chosen, experts)
        assert torch.allclose(weights, scores.gather(-1, experts) * config.routed_scaling_factor)


def assert_replayed(model: Any) -> None:
    forward, pack = choose_forward(model), pack_sequence((torch.arange(1, 30) * 7919 % 93 + 3).tolist())
    used = [[] for _ in range(RoutingReplay(forward, torch.float32).layers)]
    replay = RoutingReplay(forward, torch.float32)
    with replay._routers.asked(lambda layer, column, experts: used[layer].append(experts)):
        plain, gradient = passed(forward, pack)
    routes = torch.stack([torch.cat(columns, -1) for columns in used], 1)
    with replay(routed(pack, routes)):
        forced, again = passed(forward, pack)
    assert torch.equal(plain, forced)
    assert gradient.keys() == again.keys() and all(torch.equal(gradient[key], again[key]) for key in gradient)
    other = routes.clone()
    other[PLANTED] = (other[PLANTED] + 1) % torch.tensor(replay._routers.experts)[:, None]
    taken = inputs_of_experts(model)
    with replay(routed(pack, other)):
        changed, _ = passed(forward, pack)
    assert torch.allclose(changed[:PLANTED], plain[:PLANTED], atol=1e-5)
    assert abs(changed[PLANTED] - plain[PLANTED]) > 1e-3
    if taken:  # by modules that are told by index
        assert torch.equal(torch.stack(taken[-replay.layers :], 1), other)


def routed(pack: Pack, routes: torch.Tensor) -> Pack:
    return replace(pack, routing=routes.to(torch.int16))


def passed(forward: Forward, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and the gradient of their sum."""
    forward.model.zero_grad(set_to_none=True)
    found = forward.logprobs(pack, 1.0, torch.float32).logprob
    found.sum().backward()
    return found.detach(), {name: p.grad for name, p in forward.model.named_parameters() if p.grad is not None}


def inputs_of_experts(model: Any) -> list[torch.Tensor]:
    """Filled with the indices [T, k] that experts are called with, where they are: ZAYA's skipping expert is another index to them."""
    taken: list[torch.Tensor] = []

    def take(_: Any, inputs: tuple[Any, ...]) -> None:
        if len(inputs) > 1 and not inputs[1].is_floating_point():
            taken.append(inputs[1].reshape(-1, inputs[1].shape[-1]))

    for name, module in model.named_modules():
        if name.endswith(".experts") and model.config.model_type != "zaya":
            module.register_forward_pre_hook(take)
    return taken


def test_experts_that_are_looked_up_one_by_one_are_refused_by_name():
    """Doge's are rows of an embedding, chosen by two halves of a key."""
    config = small_config("doge")
    config.is_moe, config.num_experts, config.num_experts_per_tok = True, 16, 2
    model = small_model("doge", config=config)
    with pytest.raises(ConfigError, match=r"DogeForCausalLM: it has no .*set rollout.keep_routing = false"):
        RoutingReplay(choose_forward(model), torch.float32)
