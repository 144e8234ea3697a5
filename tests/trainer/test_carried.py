"""Trees through layers that keep a state: the hidden states and gradients of single rows, whatever the tree, with fewer tokens forwarded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import token_mean
from headrace.core.batches import Batch, Group
from headrace.core.types import Prompt
from headrace.testing.small_models import small_model
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.carried import carried_hidden, carries
from headrace.trainer.forward.forward import choose_forward, inner_of
from headrace.trainer.forward.routing import RoutingReplay
from headrace.trainer.packing import ROOT, Segment, StepRows, pack_rows
from headrace.trainer.step.trainer import TorchTrainer
from support import plain_trainer
from support.few import few

NAMES = ["qwen3_next", "granitemoehybrid", "gpt_oss", "lfm2_moe", "moshi"]
"""A delta rule, Mamba 2 and experts; sinks and windows; short convolutions; a window that its config names, its cache has, and a pass over a row has not."""
TOKENS = torch.arange(1, 61) * 7919 % 93 + 3


@cache
def model_of(name: str) -> Any:
    model = small_model(name).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others multiply no float64
    return model


def random_tree(rng: random.Random, tokens: int) -> tuple[Segment, ...]:
    """Segments one behind the other, many of them of one token, each a beginning or a branch of one before."""
    found: list[Segment] = []
    while (start := found[-1].end if found else 0) < tokens:
        length = min(rng.choice((1, 1, 2, 3, 7, 12)), tokens - start)
        found.append(Segment(start, length, rng.randrange(-1, len(found)) if found else ROOT))
    return tuple(found)


def alone(inner: Any, segments: Sequence[Segment]) -> Tensor:
    """The same hidden states, each segment by a pass over it and its ancestors."""
    found = []
    for segment in segments:
        places, above = list(range(segment.start, segment.end)), segment.parent
        while above != ROOT:
            places = [*range(segments[above].start, segments[above].end), *places]
            above = segments[above].parent
        found.append(inner(input_ids=TOKENS[None, places], use_cache=False).last_hidden_state[0, -segment.length :])
    return torch.cat(found)


def numbers(model: Any, hidden: Tensor) -> list[Tensor]:
    slope = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden).cos()
    wanted = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((hidden * slope).sum(), wanted, allow_unused=True)
    return [hidden, *(torch.zeros(1) if gradient is None else gradient for gradient in gradients)]


@pytest.mark.parametrize(
    "name",
    few([pytest.param(name, marks=pytest.mark.slow) if name == "granitemoehybrid" else name for name in NAMES], keep=1),
)
def test_any_tree_has_the_numbers_of_single_rows(name):
    model, rng = model_of(name), random.Random(name)
    inner = inner_of(model)
    for _ in range(2):
        segments = random_tree(rng, rng.randrange(20, len(TOKENS)))
        ours, theirs = (numbers(model, way(inner, segments)) for way in (by_states, alone))
        for found, wanted in zip(ours, theirs, strict=True):
            assert torch.allclose(found, wanted, rtol=0, atol=5e-4 * float(wanted.detach().abs().max())), segments


def by_states(inner: Any, segments: Sequence[Segment]) -> Tensor:
    return carried_hidden(inner, TOKENS, segments)


class Cutting(torch.nn.Module):
    """A model whose states pass no gradient on."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Tensor, cache: Any = None, **options: Any) -> Any:
        for layer in () if cache is None else cache.layers:
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    parts = {key: one.detach() if isinstance(one, Tensor) else one for key, one in value.items()}
                    setattr(layer, name, parts)
                elif isinstance(value, Tensor):
                    setattr(layer, name, value.detach())
        return self.inner(input_ids=input_ids, cache=cache, **options)


def test_a_model_whose_states_pass_no_gradient_on_is_not_run_this_way():
    model = small_model("qwen3_next")
    inner = inner_of(model)
    assert carries(model, inner, TOKENS)
    assert not carries(model, Cutting(inner).eval(), TOKENS)


@pytest.mark.parametrize("name", ["mamba", "openai-gpt"])
def test_layers_that_begin_anew_or_keep_nothing_go_row_by_row(name):
    forward = choose_forward(small_model(name))
    assert not forward.shares and forward.path == "row by row, chunked head"


@pytest.mark.slow
def test_a_step_shares_prompts_unless_layers_are_checkpointed(tmp_path):
    small_model("qwen3_next").save_pretrained(tmp_path)
    rows = tuple(plain_trainer.rows(random.Random(1)))
    batch, reports = Batch(0, (Group(0, Prompt("p", "", (1,)), (), rows),)), {}
    for checkpointed in (False, True):
        config = TrainConfig(dtype="float32", device="cpu", gradient_checkpointing=checkpointed)
        trainer = TorchTrainer(tmp_path, config, AlgoConfig(), 0)
        assert trainer.packed != checkpointed
        reports[checkpointed] = trainer.step(batch)
    one, other = reports[False], reports[True]
    assert one.forward_tokens < other.forward_tokens
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_recorded_experts_reach_their_tokens_in_a_tree():
    model = small_model("granitemoehybrid")
    forward = choose_forward(model)
    assert forward.carried
    rows = plain_trainer.rows(random.Random(3), experts=(RoutingReplay(forward, torch.float32).layers, 8, 2))
    found = []
    for share, way in ((True, forward), (False, replace(forward, carried=False))):
        (pack,) = pack_rows(StepRows(rows, token_mean, constant=0, budget=4096, step=0, share=share)).packs
        with RoutingReplay(way, torch.float32)(pack):
            scores = way.logprobs(pack, 1.0, torch.float32).logprob
        found.append(scores[pack.row.argsort(stable=True)])
    assert torch.allclose(*found, atol=1e-5)
    with torch.no_grad():
        live = forward.logprobs(pack, 1.0, torch.float32).logprob
    assert not torch.allclose(scores, live, atol=1e-3)
