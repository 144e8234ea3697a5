"""Ranks in processes of their own compute what one device computes: gradients, steps, checkpoints, whatever is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comparisons import (
    capture_and_go_on,
    compare_exact,
    compare_steps,
    refused,
    resume,
    save_after_two,
    third_step,
    three_in_a_row,
)
from rank_processes import RankProcesses
from sharded_case import CPU, GROUPS, Case, Piped, compare, trainer_of_rank
from torch.distributed.tensor import DTensor

from headrace.trainer.forward.forward import within
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.parallel import ParallelConfig, sums_once
from headrace.trainer.placement.sharded import least
from headrace.trainer.step.checkpoint import saved_weights
from support import tiny_models
from support.few import few

CASES = {
    "llama": Case(model="llama"),
    "tied": Case(model="llama-tied-biased"),
    "qwen3 (tied)": Case(model="qwen3"),
    "gemma3 (tied)": Case(model="gemma3_text"),
    "gpt2": Case(model="gpt2"),
    "gemma2, row by row": Case(model="gemma2"),
    "granite, by its own head": Case(model="granite"),
    "qwen3_moe": Case(model="qwen3_moe"),
    "mixtral": Case(model="mixtral"),
    "recorded experts": Case(model="qwen3_moe", routing=True),
    "whole experts": Case(model="qwen3_moe", parallel={"expert": 2}),
    "whole experts of mixtral": Case(model="mixtral", parallel={"expert": 2}),
    "whole experts of olmoe": Case(model="olmoe", parallel={"expert": 2}),
    "whole experts, recorded": Case(model="qwen3_moe", routing=True, parallel={"expert": 2}),
    "whole experts, checkpointed": Case(
        model="qwen3_moe", routing=True, train={"gradient_checkpointing": True}, parallel={"expert": 2}
    ),
    "LoRA beside whole experts": Case(model="qwen3_moe", lora={"rank": 4}, parallel={"expert": 2}),
    "whole experts with a reference": Case(model="mixtral", algo={"kl": {"coef": 0.1}}, parallel={"expert": 2}),
    "whole experts, filled up": Case(model="qwen3_moe", groups=((5, 1), (30, 1), (4, 4)), parallel={"expert": 2}),
    "sampling masks": Case(model="qwen3", masks=True),
    "a teacher": Case(model="llama", algo={"name": "opd_topk", "distill": {"k": 3}}, top=3),
    "kept": Case(
        model="llama",
        algo={"denominator": "kept", "old": "trainer", "correction": {"mode": "mask", "low": 0.5, "high": 2.0}},
    ),
    "m2po": Case(model="llama", algo={"name": "m2po", "tau": 0.05}),
    "a reference": Case(model="gemma3_text", algo={"kl": {"coef": 0.1}}),
    "a critic": Case(model="qwen3", algo={"name": "ppo", "lam": 0.9, "critic": {"trunk": 0.5}}),
    "preferences": Case(model="qwen3", algo={"name": "dpo"}, pairs=((0, 1), (0, 3), (4, 2), (5, 8), (9, 6))),
    "LoRA": Case(model="qwen3", lora={"rank": 4}),
    "DoRA": Case(model="llama", lora={"rank": 4, "dora": True}),
    "LoRA with a reference": Case(model="llama", lora={"rank": 4}, algo={"kl": {"coef": 0.1}}),
    "checkpointed layers": Case(model="qwen3", train={"gradient_checkpointing": True}),
    "checkpointed experts": Case(model="qwen3_moe", routing=True, train={"gradient_checkpointing": True}),
    "once a step": Case(model="llama-tied-biased", parallel={"reduce": "step"}),
    "once a step, recorded experts": Case(model="qwen3_moe", routing=True, parallel={"reduce": "step"}),
    "once a step, whole experts": Case(model="mixtral", parallel={"expert": 2, "reduce": "step"}),
    "once a step, microbatches together": Case(
        model="qwen3", parallel={"shard": 1, "context": 2, "reduce": "step"}, train={"microbatch_tokens": 6}
    ),
    "kept gathered": Case(model="qwen3", parallel={"reshard": False}),
    "filled up": Case(model="qwen3", groups=((5, 1), (30, 1), (4, 4))),
}


@pytest.mark.parametrize("name", few(CASES, keep=9))
def test_two_ranks_have_the_gradient_of_one_device(name: str, two: RankProcesses) -> None:
    compare(two, CASES[name], least=2 if "filled up" in name else 3)


def test_one_autocast_a_microbatch_rounds_as_on_one_device(two: RankProcesses) -> None:
    """Rounding to bfloat16 falls otherwise where sums are in another order; a stale copy of a weight would be off by half."""
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16"}), 1e-2)
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16"}, parallel={"gather": "bfloat16"}), 6e-2)
    together = {"gather": "bfloat16", "reduce": "step"}
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16"}, parallel=together), 6e-2)
    compare(two, Case(model="qwen3", train={"dtype": "bfloat16", "weights": "bfloat16"}), 3e-2)
    compare(two, Case(model="qwen3_moe", routing=True, train={"dtype": "bfloat16"}, parallel={"expert": 2}), 3e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "qwen3 (tied)", "gemma3 (tied)", "recorded experts", "LoRA", "a reference"])
@pytest.mark.parametrize(
    "parallel", [{"shard": 4}, {"shard": 2, "replicate": 2}, {"shard": 2, "replicate": 2, "reduce": "step"}]
)
def test_four_ranks_have_the_gradient_of_one_device(name: str, parallel: dict[str, int], four: RankProcesses) -> None:
    compare(four, Case(CASES[name], groups=(*GROUPS, *GROUPS), parallel=parallel))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole experts", "whole experts, recorded"])
def test_four_ranks_with_whole_experts_have_the_gradient_of_one_device(name: str, four: RankProcesses) -> None:
    compare(four, Case(CASES[name], groups=(*GROUPS, *GROUPS), parallel={"shard": 4, "expert": 4}))


def own_gpu_and_how_often() -> bool:
    """Whether a rank sums gradients once a step where each has twice the GPU of the one before."""
    own, parallel = 80 << torch.distributed.get_rank(), ParallelConfig(shard=2)
    return sums_once(parallel, 6, least(own))


def test_ranks_with_different_gpus_sum_gradients_equally_often(two: RankProcesses) -> None:
    assert two.run(own_gpu_and_how_often) == [False, False]
    assert sums_once(ParallelConfig(shard=2), 6, 160)  # what the larger one alone would do


def test_a_model_without_experts_is_refused(two: RankProcesses) -> None:
    case = Case(model="llama", parallel={"expert": 2})
    for said in two.run(refused, tiny_models.saved("llama"), case):
        assert "LlamaForCausalLM has no experts that can be split; remove it" in said


# -- in float64 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(["llama", "llama-tied-biased", "qwen3", "gemma3_text"], keep=1))
def test_three_steps_in_float64_end_at_the_weights_of_one_device(name: str, two: RankProcesses) -> None:
    compare_exact(two, name, ParallelConfig(shard=2, reduce="step" if name == "qwen3" else "auto"))


# -- steps, checkpoints ------------------------------------------------------------------------------------------------------


STEPS = {
    "qwen3": Case(model="qwen3", algo={"kl": {"coef": 0.1}}, train={"max_grad_norm": 0.1, "weight_decay": 0.1}),
    "experts": Case(model="mixtral", train={"gradient_checkpointing": True}),
    "whole experts": Case(
        model="qwen3_moe",
        routing=True,
        algo={"kl": {"coef": 0.1}},
        train={"max_grad_norm": 0.1, "weight_decay": 0.1},
        parallel={"expert": 2},
    ),
    "LoRA": Case(model="gemma3_text", lora={"rank": 4}),
    "a critic": Case(model="qwen3", algo={"name": "ppo", "critic": {"trunk": 0.5, "alone_steps": 1}}),
    "microbatches together": Case(
        model="nine-heads",
        masks=True,
        algo={"kl": {"coef": 0.1}},
        train={"max_grad_norm": 0.1, "weight_decay": 0.1, "microbatch_tokens": 6},
        parallel={"shard": 1, "context": 2},
    ),
}


@pytest.mark.parametrize("name", few(STEPS, keep=2))
def test_three_steps_end_at_the_weights_of_one_device(name: str, two: RankProcesses) -> None:
    compare_steps(two, STEPS[name], share=0.5)


RESUMED = {
    "qwen3": Case(model="qwen3"),
    "a critic": Case(model="qwen3", algo={"name": "ppo", "critic": {"trunk": 0.5}}),
    "bfloat16": Case(model="llama", train={"weights": "bfloat16", "dtype": "bfloat16", "learning_rate": 1e-2}),
    "whole experts": Case(model="qwen3_moe", parallel={"expert": 2}),
    "LoRA": Case(model="qwen3", lora={"rank": 4}),
    "microbatches together": Case(
        model="gemma3_text", train={"microbatch_tokens": 6}, parallel={"shard": 1, "context": 2}
    ),
}


@pytest.mark.parametrize("name", few(RESUMED, keep=2))
def test_a_checkpoint_goes_on_bit_for_bit_on_its_mesh_and_equally_on_another(
    name: str, two: RankProcesses, tmp_path: Path
) -> None:
    resume(two, RESUMED[name], tmp_path, near=3e-5 if name != "bfloat16" else 0.1)  # rounded with other random numbers


CAPTURED = {
    "FSDP2": Case(model="llama-deep"),
    "TP": Case(model="llama", parallel={"shard": 1, "tensor": 2}),
    "a pipeline": Piped(model="qwen3-deep"),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_each_rank_writes_its_part_of_the_moment_of_the_capture(name: str, two: RankProcesses, tmp_path: Path) -> None:
    case = CAPTURED[name]
    directory = tiny_models.saved(case["model"])
    for own, everything in two.run(capture_and_go_on, directory, case, tmp_path):
        assert 0.3 * everything < own < 0.7 * everything + 20_000  # and names and places
    whole = two.run(three_in_a_row, directory, case)
    for (expected, state), (found, found_state) in zip(
        whole, two.run(third_step, directory, case, tmp_path / "checkpoint"), strict=True
    ):
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        assert torch.equal(state, found_state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "LoRA"])
def test_a_checkpoint_of_two_ranks_goes_on_on_four(
    name: str, two: RankProcesses, four: RankProcesses, tmp_path: Path
) -> None:
    case = Case(RESUMED[name], groups=(*GROUPS, *GROUPS))
    directory = tiny_models.saved(case["model"])
    two.run(save_after_two, directory, case, tmp_path)
    expected, _ = two.run(three_in_a_row, directory, case)[0]
    for parallel in ({"shard": 4}, {"shard": 2, "replicate": 2}, {"shard": 1, "context": 4}, {"context": 2}):
        for found, _ in four.run(third_step, directory, Case(case, parallel=parallel), tmp_path / "checkpoint"):
            for key, tensor in expected.items():  # Adam makes ±lr of the rounding of a gradient near zero
                assert (tensor - found[key]).abs().max() <= 3e-5, key


def test_what_ranks_export_one_device_loads(two: RankProcesses, tmp_path: Path) -> None:
    case = Case(model="qwen3")
    two.run(save_after_two, tiny_models.saved("qwen3"), case, tmp_path)
    saved, exported = saved_weights(tmp_path / "checkpoint"), load_model(tmp_path / "export", CPU)
    for key, parameter in exported.named_parameters():
        assert torch.equal(parameter, saved.read(key)), key


def kinds_of_head(directory: Path, case: Case) -> tuple[bool, bool]:
    """Whether the head's matrix is in parts: within the root's call, and after it."""
    one = trainer_of_rank(directory, case)
    in_parts = lambda: isinstance(one._model.get_output_embeddings().weight, DTensor)  # noqa: E731
    with torch.no_grad():
        return within(one._model, in_parts), in_parts()


def test_weights_lie_in_parts_outside_of_the_root(two: RankProcesses) -> None:
    assert two.run(kinds_of_head, tiny_models.saved("qwen3"), Case(model="qwen3")) == [(False, True)] * 2
