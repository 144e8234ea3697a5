"""Ranks that compute each microbatch together (`train.parallel.context`) have the gradients and the weights of one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import NEAR
from rank_processes import RankProcesses
from sharded_case import BUDGET, CPU, GROUPS, Case, compare, trainer_of_rank
from torch import Tensor

from headrace.algo.objective import AGGREGATIONS
from headrace.core.errors import ConfigError
from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.forward import choose_forward, together, within
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.packing import Kept, Pack, StepRows
from headrace.trainer.parallel import ParallelConfig, repeats
from headrace.trainer.placement.port import Microbatches, Placement, Single
from headrace.trainer.placement.sharded import Sharded
from support import tiny_models
from support.few import few
from support.trainer_calls import own_plan


def spread(case: dict[str, Any], **parallel: int) -> Case:
    """The case on this mesh, with packs of the same size as on any other."""
    mesh = {"shard": 1, "context": 2, **case.get("parallel", {}), **parallel}
    train = {**case.get("train", {}), "microbatch_tokens": BUDGET // mesh["context"]}
    return Case(case, parallel=mesh, train=train)


CASES = {
    "windows and sampling masks": Case(model="gemma3_text", masks=True),
    "gathered": Case(model="nine-heads"),
    "recorded experts, checkpointed": Case(model="qwen3_moe", routing=True, train={"gradient_checkpointing": True}),
    "LoRA, preferences, a reference": Case(
        model="qwen3", lora={"rank": 4}, algo={"name": "dpo"}, pairs=((0, 1), (0, 3), (4, 2), (5, 8), (9, 6))
    ),
}
OTHERS = {
    "llama": Case(model="llama"),
    "tied": Case(model="llama-tied-biased"),
    "qwen3 (tied)": Case(model="qwen3"),
    "gpt2": Case(model="gpt2"),
    "windows": Case(model="mistral-sliding"),
    "one key head, repeated": Case(model="one-key-head"),
    "gathered, masks": Case(model="nine-heads", masks=True, train={"gradient_checkpointing": True}),
    "qwen3_moe": Case(model="qwen3_moe"),
    "mixtral": Case(model="mixtral"),
    "whole experts": Case(model="qwen3_moe", parallel={"expert": 2}),
    "whole experts, recorded": Case(model="qwen3_moe", routing=True, parallel={"expert": 2}),
    "a teacher": Case(model="llama", masks=True, algo={"name": "opd_topk", "distill": {"k": 3}}, top=3),
    "a ratio of sequences": Case(model="llama", algo={"name": "gspo"}),
    "kept": Case(
        model="llama",
        algo={"denominator": "kept", "old": "trainer", "correction": {"mode": "mask", "low": 0.5, "high": 2.0}},
    ),
    "m2po": Case(model="llama", algo={"name": "m2po", "tau": 0.05}),
    "a reference": Case(model="gemma3_text", algo={"kl": {"coef": 0.1}}),
    "a critic": Case(model="qwen3", algo={"name": "ppo", "lam": 0.9, "critic": {"trunk": 0.5}}),
    "a reference of recorded experts": Case(model="mixtral", routing=True, algo={"kl": {"coef": 0.1}}),
    "LoRA": Case(model="qwen3", lora={"rank": 4}),
    "DoRA": Case(model="llama", lora={"rank": 4, "dora": True}),
    "kept gathered": Case(model="qwen3", parallel={"reshard": False}),
}


@pytest.mark.parametrize("name", few(CASES, keep=2))
def test_two_ranks_that_share_microbatches_have_the_gradient_of_one_device(name: str, two: RankProcesses) -> None:
    compare(two, spread(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_whatever_is_trained(name: str, two: RankProcesses) -> None:
    compare(two, spread(OTHERS[name]))


@pytest.mark.slow
def test_in_bfloat16_queries_and_keys_are_rounded_too(two: RankProcesses) -> None:
    """One device computes attention of few keys in float32. No loss with a bound: a token that rounding takes across it counts in full."""
    for name in ("qwen3", "nine-heads"):
        compare(two, spread(Case(model=name, algo={"name": "ce"}, train={"dtype": "bfloat16"})), 5e-2)


MESHES = {"four": {"context": 4}, "split": {"shard": 2}, "copies": {"replicate": 2}}
FOURS = {
    "repeated key heads": Case(model="gemma3_text", masks=True),
    "gathered": Case(model="nine-heads"),
    "recorded experts": Case(model="qwen3_moe", routing=True),
    "LoRA": Case(model="qwen3", lora={"rank": 4}),
    "a reference": Case(model="llama-tied-biased", algo={"kl": {"coef": 0.1}}),
    "m2po": Case(model="llama", algo={"name": "m2po", "tau": 0.05}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOURS)
@pytest.mark.parametrize("mesh", MESHES)
def test_four_ranks_that_share_microbatches_have_the_gradient_of_one_device(
    name: str, mesh: str, four: RankProcesses
) -> None:
    rounding = (
        1e-5 if name == "LoRA" else 3e-6
    )  # 4e-6: its weights are large, and products of three tokens have another order
    compare(four, spread(Case(FOURS[name], groups=(*GROUPS, *GROUPS)), **MESHES[mesh]), rounding)


@pytest.mark.slow
def test_four_ranks_whose_experts_are_whole(four: RankProcesses) -> None:
    case = Case(model="qwen3_moe", routing=True, groups=(*GROUPS, *GROUPS))
    compare(four, spread(case, shard=2, expert=4))


@pytest.mark.slow
def test_packs_that_only_fill_up_are_spread_too(four: RankProcesses) -> None:
    compare(four, spread(Case(model="qwen3", groups=((5, 1), (30, 1), (4, 4))), shard=2), least=2)


def refused(directory: Path, case: Case) -> str:
    with pytest.raises(ConfigError) as caught:
        trainer_of_rank(directory, case)
    return str(caught.value)


def test_a_model_that_is_run_row_by_row_is_refused(two: RankProcesses) -> None:
    for said in two.run(refused, tiny_models.saved("gemma2"), spread(Case(model="gemma2"))):
        assert "Gemma2ForCausalLM is run row by row" in said and "set train.parallel.shard = 2" in said


# -- in float64 --------------------------------------------------------------------------------------------------------------


def exact_steps(directory: Path, placement: Placement, case: Case) -> dict[str, Tensor]:
    """Three clipped steps of packed trees."""
    model = load_model(directory, CPU)
    forward = together(choose_forward(model), placement.context)
    placement.spread(model.double())
    named = dict(model.named_parameters())
    parameters, head = list(named.values()), model.get_output_embeddings()
    optimizer = placement.optimizer(named.items(), TrainConfig(learning_rate=1e-3, weight_decay=0.1))

    def nll(pack: Pack) -> Tensor:
        hidden, context = forward._hidden(pack), placement.context
        predictor, target = pack.predictor, pack.target
        if context:
            mine = context.places(predictor)
            predictor, target = predictor[mine] // context.size, target[mine]
        logits = within(head, lambda: hidden[predictor] @ head.weight.t())
        return torch.nn.functional.cross_entropy(logits, target, reduction="sum") / 30

    for step in range(3):
        aggregation, budget = AGGREGATIONS["token_mean"], case.settings["microbatch_tokens"]
        rows = case.batch(step).rows
        packs = own_plan(StepRows(rows, aggregation, constant=0, budget=budget, step=step), placement).packs
        assert len(packs) >= 3

        @contextmanager
        def microbatch(number: int, packs: tuple[Pack, ...] = packs) -> Iterator[Tensor]:
            yield within(model, lambda: nll(packs[number]))

        work = Microbatches(packs=packs, loss=microbatch, body=len, precision=nullcontext, parameters=parameters)  # type: ignore[arg-type]
        placement.accumulate(work)
        norm = placement.norm(parameters)
        assert norm > 0.5
        placement.clip(parameters, norm, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: placement.whole(parameter) for name, parameter in named.items()}


def exact_steps_of_rank(directory: Path, case: Case) -> dict[str, Tensor]:
    return exact_steps(directory, Sharded(case.ranks, CPU), case)


def compare_exactly(ranks: RankProcesses, case: Case) -> None:
    directory = tiny_models.saved(case["model"])
    expected = exact_steps(directory, Single(), Case(case, train={}))
    before = load_model(directory, CPU).state_dict()
    for found in ranks.run(exact_steps_of_rank, directory, case):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert (one - before[key]).abs().max() > 1e-3, key
            assert (found[key] - one).abs().max() <= NEAR.get(case["model"], 1e-12), key


def test_three_steps_in_float64_end_at_the_weights_of_one_device(two: RankProcesses) -> None:
    compare_exactly(two, spread(Case(model="gemma3_text")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3", "nine-heads", "one-key-head"])
def test_three_steps_in_float64_of_every_way(name: str, two: RankProcesses, four: RankProcesses) -> None:
    compare_exactly(two, spread(Case(model=name)))
    many = Case(model=name, groups=(*GROUPS, *GROUPS))
    for mesh in MESHES.values():
        compare_exactly(four, spread(many, **mesh))


# -- parts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "context", "expected"),
    [(32, 8, 4, 1), (32, 8, 16, 2), (12, 2, 4, 2), (12, 3, 2, 2), (64, 8, 64, 8), (9, 3, 2, 0), (9, 3, 9, 3)],
)
def test_how_often_key_heads_are_sent(heads: int, kv_heads: int, context: int, expected: int) -> None:
    assert repeats(heads, kv_heads, context) == expected


def test_kept_ids_of_some_places() -> None:
    kept = Kept(torch.tensor([3, 5, 9, 2, 4, 8]), torch.tensor([0, 2, 2, 3, 6]))
    chosen = kept.chosen(torch.tensor([0, 1, 3]))
    assert (chosen.ids.tolist(), chosen.offsets.tolist()) == ([3, 5, 2, 4, 8], [0, 2, 2, 5])
    none = kept.chosen(torch.tensor([], dtype=torch.int64))
    assert (none.ids.tolist(), none.offsets.tolist()) == ([], [0])


def test_the_mesh_of_a_context() -> None:
    mesh = ParallelConfig(shard=2, context=4, replicate=3)
    assert (mesh.ranks, mesh.split, mesh.batches) == (24, 8, 6)
