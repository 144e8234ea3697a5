"""Ranks that compute every layer together, by the model's tensor-parallel plan, end where one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import (
    compare_exact,
    compare_steps,
    refused,
    resume,
    steps,
    third_step,
    three_in_a_row,
    weights,
)
from rank_processes import RankProcesses
from sharded_case import CPU, GROUPS, Case, compare, trainer_of_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from headrace.models.lora import LoraConfig
from headrace.trainer.forward.head import token_logprobs
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import local
from headrace.trainer.packing import Kept
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.step.checkpoint import saved_weights
from support import tiny_models
from support.few import few

TENSOR = {"shard": 1, "tensor": 2}
EXPERTS = {**TENSOR, "expert": 2}
BOTH = {"shard": 2, "tensor": 2}
CLEAR = ((6, 3), (4, 2), (5, 3), (3, 2))
"""Prompts and completions for which one device's own rounding is 1.1e-6 in Gemma 3's norms of heads."""
CASES = {
    "llama": Case(model="llama", masks=True, parallel=TENSOR),
    "qwen3 (tied)": Case(model="qwen3", parallel=TENSOR),
    "gemma3 (tied)": Case(model="gemma3_text", groups=CLEAR, algo={"kl": {"coef": 0.1}}, parallel=TENSOR),
    "qwen3_moe": Case(model="qwen3_moe", routing=True, parallel=TENSOR),
    "whole experts": Case(model="qwen3_moe", routing=True, parallel=EXPERTS),
    "LoRA": Case(model="qwen3", masks=True, lora={"rank": 4}, parallel=TENSOR),
    "DoRA, biased": Case(model="llama-tied-biased", lora={"rank": 4, "dora": True}, parallel=TENSOR),
}
MORE = {
    "tied, biased": Case(model="llama-tied-biased", parallel=TENSOR),
    "gemma2, row by row": Case(model="gemma2", parallel=TENSOR),
    "granite, by its own head": Case(model="granite", parallel=TENSOR),
    "mixtral": Case(model="mixtral", parallel=TENSOR),
    "live experts": Case(model="qwen3_moe", parallel=TENSOR),
    "olmoe": Case(model="olmoe", parallel=TENSOR),
    "whole experts of mixtral": Case(model="mixtral", parallel=EXPERTS),
    "whole experts of olmoe": Case(model="olmoe", parallel=EXPERTS),
    "checkpointed layers": Case(model="qwen3", train={"gradient_checkpointing": True}, parallel=TENSOR),
    "checkpointed experts": Case(
        model="qwen3_moe", routing=True, train={"gradient_checkpointing": True}, parallel=EXPERTS
    ),
    "a teacher": Case(model="llama", algo={"name": "opd_topk", "distill": {"k": 3}}, top=3, parallel=TENSOR),
    "kept": Case(
        model="llama",
        algo={"denominator": "kept", "old": "trainer", "correction": {"mode": "mask", "low": 0.5, "high": 2.0}},
        parallel=TENSOR,
    ),
    "m2po": Case(model="llama", algo={"name": "m2po", "tau": 0.05}, parallel=TENSOR),
    "a critic": Case(model="qwen3", algo={"name": "ppo", "lam": 0.9, "critic": {"trunk": 0.5}}, parallel=TENSOR),
    "preferences": Case(
        model="qwen3", algo={"name": "dpo"}, pairs=((0, 1), (0, 3), (4, 2), (5, 8), (9, 6)), parallel=TENSOR
    ),
    "LoRA with a reference": Case(model="llama", lora={"rank": 4}, algo={"kl": {"coef": 0.1}}, parallel=TENSOR),
    "LoRA, biased": Case(model="llama-tied-biased", lora={"rank": 4}, parallel=TENSOR),
    "LoRA, checkpointed": Case(
        model="gemma3_text", groups=CLEAR, lora={"rank": 4}, train={"gradient_checkpointing": True}, parallel=TENSOR
    ),
    "LoRA of some layers": Case(model="llama", lora={"rank": 4, "targets": ("q_proj", "down_proj")}, parallel=TENSOR),
    "LoRA of a mixture": Case(model="qwen3_moe", routing=True, lora={"rank": 4}, parallel=TENSOR),
    "LoRA beside whole experts": Case(model="qwen3_moe", routing=True, lora={"rank": 4}, parallel=EXPERTS),
    "DoRA": Case(model="qwen3", lora={"rank": 4, "dora": True}, parallel=TENSOR),
}
WIDE = {"groups": (*GROUPS, *GROUPS)}
FOUR = {
    "llama": Case(model="llama", parallel=BOTH, **WIDE),
    "tied, biased": Case(model="llama-tied-biased", masks=True, parallel=BOTH, **WIDE),
    "qwen3": Case(model="qwen3", parallel=BOTH, **WIDE),
    "qwen3, kept gathered": Case(model="qwen3", parallel={**BOTH, "reshard": False}, **WIDE),
    "gemma3": Case(model="gemma3_text", algo={"kl": {"coef": 0.1}}, parallel=BOTH, **WIDE),
    "qwen3_moe": Case(model="qwen3_moe", routing=True, parallel=BOTH, **WIDE),
    "whole experts": Case(model="qwen3_moe", routing=True, parallel={**BOTH, "expert": 4}, **WIDE),
    "whole experts of mixtral": Case(model="mixtral", parallel={**BOTH, "expert": 4}, **WIDE),
    "filled up": Case(model="llama", groups=((5, 1), (30, 1), (4, 4)), parallel=BOTH),
    "LoRA": Case(model="qwen3", masks=True, lora={"rank": 4}, parallel=BOTH, **WIDE),
    "DoRA": Case(model="llama-tied-biased", lora={"rank": 4, "dora": True}, parallel=BOTH, **WIDE),
    "LoRA beside whole experts": Case(
        model="qwen3_moe", routing=True, lora={"rank": 4}, parallel={**BOTH, "expert": 4}, **WIDE
    ),
}
COPIES = {**BOTH, "replicate": 2}
EIGHT = {
    "tied, biased": Case(model="llama-tied-biased", masks=True, parallel=COPIES, **WIDE),
    "qwen3": Case(model="qwen3", parallel=COPIES, **WIDE),
    "gemma3": Case(model="gemma3_text", algo={"kl": {"coef": 0.1}}, parallel=COPIES, **WIDE),
    "qwen3_moe": Case(model="qwen3_moe", routing=True, parallel=COPIES, **WIDE),
    "filled up": Case(model="llama", groups=((5, 1), (30, 1), (4, 4)), parallel=COPIES),
    "LoRA": Case(model="qwen3", masks=True, lora={"rank": 4}, parallel=COPIES, **WIDE),
}


@pytest.mark.parametrize("name", few(CASES, keep=3))
def test_two_ranks_have_the_gradient_of_one_device(name: str, two: RankProcesses) -> None:
    """Qwen3's norms of heads among them, over several microbatches: transformers would count the earlier ones twice."""
    compare(two, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_have_it_whatever_is_trained(name: str, two: RankProcesses) -> None:
    compare(two, MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_of_both_kinds_have_the_gradient_of_one_device(name: str, four: RankProcesses) -> None:
    compare(four, FOUR[name], least=2 if name == "filled up" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_copies_of_both_kinds_have_the_gradient_of_one_device(name: str, eight: RankProcesses) -> None:
    compare(eight, EIGHT[name], least=1 if name == "filled up" else 3)


@pytest.mark.slow
def test_rounding_is_that_of_one_device(two: RankProcesses) -> None:
    """Partial sums are rounded to bfloat16 before they are added up; a wrong one would be off by half."""
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16"}, parallel=TENSOR), 1e-1)
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16", "weights": "bfloat16"}, parallel=TENSOR), 1e-1)
    compare(two, Case(model="qwen3_moe", routing=True, train={"dtype": "bfloat16"}, parallel=TENSOR), 1e-1)
    compare(two, Case(model="qwen3", lora={"rank": 4}, train={"dtype": "bfloat16"}, parallel=TENSOR), 1e-1)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_three_steps_in_float64_end_at_the_weights_of_one_device(name: str, two: RankProcesses) -> None:
    compare_exact(two, name, ParallelConfig(tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3", "gemma3_text"])
def test_three_steps_in_float64_over_four_ranks(name: str, four: RankProcesses) -> None:
    compare_exact(four, name, ParallelConfig(shard=2, tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3"])
def test_three_steps_in_float64_over_eight_ranks(name: str, eight: RankProcesses) -> None:
    compare_exact(eight, name, ParallelConfig(shard=2, tensor=2, replicate=2))


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_three_steps_of_an_adapter_in_float64(dora: bool, two: RankProcesses) -> None:
    lora = LoraConfig(rank=4, dora=dora)
    compare_exact(two, "llama-tied-biased", ParallelConfig(tensor=2), lora)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_three_steps_of_an_adapter_in_float64_over_more_ranks(
    name: str, four: RankProcesses, eight: RankProcesses
) -> None:
    compare_exact(four, name, ParallelConfig(shard=2, tensor=2), LoraConfig(rank=4))
    compare_exact(eight, name, ParallelConfig(shard=2, tensor=2, replicate=2), LoraConfig(rank=4))


# -- the head ----------------------------------------------------------------------------------------------------------------


def head_numbers(split: int | None) -> list[Tensor]:
    """Log-probs, entropies and gradients of a head whose matrix is whole, or split over two ranks by rows (0) or columns (1)."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((6, 16), (20, 16), (20,)))
    if split is not None:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(weight, mesh, [Shard(split)], src_data_rank=None)
        bias = distribute_tensor(bias, mesh, [Replicate() if split else Shard(0)], src_data_rank=None)
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    predictor, target = torch.tensor([0, 0, 2, 3, 5, 2, 4, 1]), torch.tensor([19, 4, 9, 10, 0, 12, 3, 18])
    sets = torch.tensor(
        [[0b00000000, 0b00010010, 0b00001000], [0b00001100, 0, 0]], dtype=torch.uint8
    )  # 9, 12, 19; 2, 3
    kept = Kept(
        ids=torch.tensor([4, 12, 19, 9, 11, 3, 10, 7]),
        offsets=torch.tensor([0, 3, 3, 5, 7, 8, 8, 8, 8]),
        sets=sets,
        set_of=torch.tensor([-1, -1, -1, -1, -1, 0, 1, 1]),
    )
    head = token_logprobs(*inputs, predictor, target, temperature=0.7, dtype=torch.float32, kept=kept, softcap=2.0)
    (head.logprob * torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0, 0.75, -0.5, 1.5])).sum().backward()
    gradients = [one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in inputs]
    return [head.logprob.detach(), head.entropy, torch.tensor(head.outside), *gradients]


@pytest.mark.parametrize("split", [0, 1], ids=["rows", "columns"])
def test_a_split_head_computes_what_a_whole_one_does(split: int, two: RankProcesses) -> None:
    expected = head_numbers(None)
    assert int(expected[2]) == 2
    for found in two.run(head_numbers, split):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


# -- steps, checkpoints ------------------------------------------------------------------------------------------------------

CLIPPED = {"max_grad_norm": 0.1, "weight_decay": 0.1}


def test_three_steps_end_at_the_weights_of_one_device(two: RankProcesses) -> None:
    compare_steps(two, Case(model="qwen3", train=CLIPPED, parallel=TENSOR), share=0.5)
    compare_steps(two, Case(model="qwen3", lora={"rank": 4}, parallel=TENSOR), share=0.5)


@pytest.mark.slow
def test_three_steps_with_whole_experts(two: RankProcesses, four: RankProcesses) -> None:
    case = Case(model="qwen3_moe", routing=True, algo={"kl": {"coef": 0.1}}, train=CLIPPED, parallel=EXPERTS)
    compare_steps(two, case, share=0.5, near=1e-4)
    compare_steps(four, Case(case, parallel={**BOTH, "expert": 4}, **WIDE), share=0.25, near=1e-4)


RESUMED = {
    "qwen3": Case(model="qwen3", parallel=TENSOR),
    "bfloat16": Case(
        model="qwen3",
        train={"weights": "bfloat16", "dtype": "bfloat16", "learning_rate": 1e-2},
        parallel=TENSOR,
    ),
    "whole experts": Case(model="qwen3_moe", parallel=EXPERTS),
    "LoRA": Case(model="qwen3", lora={"rank": 4}, parallel=TENSOR),
}


def test_a_checkpoint_goes_on_bit_for_bit_and_on_one_device(two: RankProcesses, tmp_path: Path) -> None:
    resume(two, RESUMED["qwen3"], tmp_path)
    saved, exported = saved_weights(tmp_path / "checkpoint"), load_model(tmp_path / "export", CPU)
    for key, parameter in exported.named_parameters():
        assert torch.equal(parameter, saved.read(key)), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "whole experts", "LoRA"])
def test_other_checkpoints_go_on(name: str, two: RankProcesses, tmp_path: Path) -> None:
    also = [Case(RESUMED[name], parallel={"shard": 2})] if name == "LoRA" else []
    resume(two, RESUMED[name], tmp_path, near=0.1 if name == "bfloat16" else 3e-5, also=also)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["all weights", "LoRA"])
def test_a_checkpoint_of_copies_goes_on_on_other_meshes(
    lora: dict[str, Any], four: RankProcesses, eight: RankProcesses, tmp_path: Path
) -> None:
    case = Case(model="qwen3", parallel=COPIES, **WIDE, **lora)
    resume(eight, case, tmp_path, also=[Case(case, parallel={"shard": 4, "tensor": 2})])
    expected, _ = eight.run(three_in_a_row, tiny_models.saved("qwen3"), case)[0]
    for parallel in (BOTH, {"shard": 2, "replicate": 2}):
        again = four.run(third_step, tiny_models.saved("qwen3"), Case(case, parallel=parallel), tmp_path / "checkpoint")
        for found, _ in again:
            for key, tensor in expected.items():
                assert (tensor - found[key]).abs().max() <= 3e-5, (parallel, key)


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_every_mesh(two: RankProcesses, four: RankProcesses, tmp_path: Path) -> None:
    case = Case(model="qwen3_moe", parallel={**BOTH, "expert": 4}, **WIDE)
    directory = tiny_models.saved("qwen3_moe")
    resume(four, case, tmp_path)
    expected, _ = four.run(three_in_a_row, directory, case)[0]
    for ranks, parallel in ((two, TENSOR), (two, {"expert": 2}), (four, {"shard": 4}), (four, BOTH)):
        for found, _ in ranks.run(third_step, directory, Case(case, parallel=parallel), tmp_path / "checkpoint"):
            for key, tensor in expected.items():
                assert (tensor - found[key]).abs().max() <= 3e-5, (parallel, key)


def whole_after_three(directory: Path, case: Case) -> tuple[dict[str, Tensor], bool, Tensor]:
    """What this rank holds whole, whether a gradient lies as its parameter does, and the published head."""
    one = trainer_of_rank(directory, case)
    steps(one, case, 2)
    given = case.batch(2)
    one._gradient(given.temperature).fill(one._plans(given)[0])
    named = dict(one._model.named_parameters())
    alike = all(local(p).shape == local(p.grad).shape for p in named.values() if p.grad is not None)
    kept = {name: p.detach().clone() for name, p in named.items() if not hasattr(p, "to_local")}
    return kept, alike, weights(one)[next(name for name in named if "embed" in name)]


def test_what_every_rank_holds_whole_stays_equal(two: RankProcesses) -> None:
    """Bit for bit, under stochastic rounding too: nothing would bring it together again."""
    case = Case(RESUMED["bfloat16"], model="qwen3_moe", parallel=EXPERTS)
    (one, alike, head), (other, _, other_head) = two.run(whole_after_three, tiny_models.saved("qwen3_moe"), case)
    assert alike and one.keys() == other.keys()
    assert {name.rpartition(".layers.0.")[2] for name in one} >= {"self_attn.q_norm.weight", "mlp.gate.weight"}
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert torch.equal(head, other_head)


def adapter_after_three(directory: Path, case: Case) -> dict[str, Tensor]:
    one = trainer_of_rank(directory, case)
    steps(one, case, 3)
    return {name: parameter.detach().clone() for name, parameter in one._learners[""].parameters.items()}


def test_an_adapter_stays_equal_on_all_ranks(two: RankProcesses) -> None:
    case = Case(model="llama-tied-biased", lora={"rank": 4, "dora": True}, parallel=TENSOR)
    one, other = two.run(adapter_after_three, tiny_models.saved(case["model"]), case)
    assert len(one) == 42 and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# -- refusals ----------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_split_is_refused(two: RankProcesses, tmp_path: Path) -> None:
    tiny_models.make("llama", vocab_size=97).save_pretrained(tmp_path / "odd")
    tiny_models.make("llama", num_key_value_heads=1).save_pretrained(tmp_path / "one head")
    halved = Case(model="llama", train={"weights": "bfloat16", "dtype": "bfloat16"}, parallel=TENSOR)
    expected = {
        tiny_models.saved(
            "qwen3_moe"
        ): "leaves 12 columns of model.layers.0.mlp.experts.down_proj, and torch multiplies",
        tiny_models.saved("gpt2"): "no tensor-parallel plan for GPT2LMHeadModel; use train.parallel.shard instead",
        tmp_path / "odd": "does not divide model.embed_tokens.weight [97, 32]; choose a divisor for it",
        tmp_path / "one head": "does not divide the model's num_key_value_heads = 1; choose a divisor for it",
    }
    for directory, sentence in expected.items():
        for said in two.run(refused, directory, halved):
            assert sentence in said
