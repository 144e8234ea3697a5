"""Ranks that compute every layer together, by the model's tensor-parallel plan, end where one device does."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from comparisons import (
    compare_exact,
    compare_steps,
    refused,
    save_after_two,
    steps,
    third_step,
    three_in_a_row,
    weights,
)
from rank_processes import RankProcesses
from safetensors.torch import load_file
from sharded_case import CPU, GROUPS, Case, compare, sharded
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from headrace.packing import Kept
from headrace.trainer.forward.head import token_logprobs
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import local
from headrace.trainer.parallel import ParallelConfig

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
    "m2po": Case(model="llama", algo={"name": "m2po", "select": {"tau": 0.05}}, parallel=TENSOR),
    "preferences": Case(
        model="qwen3", algo={"name": "dpo"}, pairs=((0, 1), (0, 3), (4, 2), (5, 8), (9, 6)), parallel=TENSOR
    ),
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
}


@pytest.mark.parametrize("name", CASES)
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
def test_rounding_is_that_of_one_device(two: RankProcesses) -> None:
    """Partial sums are rounded to bfloat16 before they are added up; a wrong one would be off by half."""
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16"}, parallel=TENSOR), 1e-1)
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16", "weights": "bfloat16"}, parallel=TENSOR), 1e-1)
    compare(two, Case(model="qwen3_moe", routing=True, train={"dtype": "bfloat16"}, parallel=TENSOR), 1e-1)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_three_steps_in_float64_end_at_the_weights_of_one_device(name: str, two: RankProcesses) -> None:
    compare_exact(two, name, ParallelConfig(tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3", "gemma3_text"])
def test_three_steps_in_float64_over_four_ranks(name: str, four: RankProcesses) -> None:
    compare_exact(four, name, ParallelConfig(shard=2, tensor=2))


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
    predictor, target = torch.tensor([0, 0, 2, 3, 5]), torch.tensor([19, 4, 9, 10, 0])
    kept = Kept(ids=torch.tensor([4, 12, 19, 9, 11, 3, 10, 7]), offsets=torch.tensor([0, 3, 3, 5, 7, 8]))
    head = token_logprobs(*inputs, predictor, target, temperature=0.7, dtype=torch.float32, kept=kept, softcap=2.0)
    (head.logprob * torch.tensor([0.5, -1.0, 2.0, 0.25, 1.0])).sum().backward()
    gradients = [one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in inputs]
    return [head.logprob.detach(), head.entropy, torch.tensor(head.outside), *gradients]


@pytest.mark.parametrize("split", [0, 1], ids=["rows", "columns"])
def test_a_split_head_computes_what_a_whole_one_does(split: int, two: RankProcesses) -> None:
    expected = head_numbers(None)
    assert int(expected[2]) == 1
    for found in two.run(head_numbers, split):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


# -- steps, checkpoints ------------------------------------------------------------------------------------------------------

CLIPPED = {"max_grad_norm": 0.1, "weight_decay": 0.1}


def test_three_steps_end_at_the_weights_of_one_device(two: RankProcesses) -> None:
    compare_steps(two, Case(model="qwen3", train=CLIPPED, parallel=TENSOR), share=0.5)


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
}


def resume(ranks: RankProcesses, case: Case, tmp_path: Path, near: float = 3e-5) -> None:
    """Two steps, a checkpoint, and the third step: on the same mesh, on one device, and from one device."""
    directory = tiny_models.saved(case["model"])
    ranks.run(save_after_two, directory, case, tmp_path)
    whole = ranks.run(three_in_a_row, directory, case)
    resumed = ranks.run(third_step, directory, case, tmp_path / "checkpoint")
    for (one, state), (other, other_state) in zip(whole, resumed, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert torch.equal(state, other_state)
    single = case.trainer(directory)
    single.restore(tmp_path / "checkpoint")
    steps(single, case, 3)
    for key, tensor in weights(single).items():
        assert (tensor - whole[0][0][key]).abs().max() <= near, key
    again = case.trainer(directory)
    steps(again, case, 2)
    again.save(tmp_path / "single")
    for found, _ in ranks.run(third_step, directory, case, tmp_path / "single"):
        for key, tensor in weights(single).items():
            assert (tensor - found[key]).abs().max() <= near, key


def test_a_checkpoint_goes_on_bit_for_bit_and_on_one_device(two: RankProcesses, tmp_path: Path) -> None:
    resume(two, RESUMED["qwen3"], tmp_path)
    saved, exported = load_file(tmp_path / "checkpoint" / "model.safetensors"), load_model(tmp_path / "export", CPU)
    for key, parameter in exported.named_parameters():
        assert torch.equal(parameter, saved[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "whole experts"])
def test_other_checkpoints_go_on(name: str, two: RankProcesses, tmp_path: Path) -> None:
    resume(two, RESUMED[name], tmp_path, near=0.1 if name == "bfloat16" else 3e-5)


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
    one = sharded(directory, case)
    steps(one, case, 2)
    given = case.batch(2)
    one._gradients(one._plan(given), given.temperature)
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
