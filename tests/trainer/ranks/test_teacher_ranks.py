"""A teacher that the trainer holds, on several ranks: its layers lie as the policy's do, and heads that are split by rows are compared by rows."""

from __future__ import annotations

import pytest
from comparisons import compare_steps
from rank_processes import RankProcesses
from sharded_case import GROUPS, Case, compare

from support.few import few

WHOLE = {"name": "gkd", "distill": {"beta": 0.3, "temperature": 1.5}}
TOP = {"name": "opd_student_topk", "distill": {"k": 5}}
TENSOR = {"shard": 1, "tensor": 2}
TOGETHER = {"parallel": {"shard": 1, "context": 2}, "train": {"microbatch_tokens": 6}}
CASES = {
    "FSDP2": Case(model="llama", teacher="qwen3", algo=WHOLE),
    "TP": Case(model="qwen3", teacher="llama", algo=WHOLE, parallel=TENSOR),
    "TP, top": Case(model="llama", teacher="qwen3", algo=TOP, parallel=TENSOR),
    "microbatches together": Case(model="llama", teacher="qwen3", algo=WHOLE, **TOGETHER),
    "FSDP2, top": Case(model="qwen3", teacher="llama", algo=TOP),
    "microbatches together, top": Case(model="llama", teacher="qwen3", algo=TOP, masks=True, **TOGETHER),
    "the sampled token": Case(model="llama", teacher="qwen3", algo={"name": "opd"}, masks=True),
    "microbatches together, the sampled token": Case(
        model="llama", teacher="qwen3", algo={"name": "opd"}, masks=True, **TOGETHER
    ),
    "TP, the sampled token": Case(model="llama", teacher="qwen3", algo={"name": "opd"}, masks=True, parallel=TENSOR),
    "row by row": Case(model="llama", teacher="gemma2", algo=WHOLE),
    "beside an adapter": Case(model="llama", teacher="qwen3", algo=WHOLE, lora={"rank": 4}),
    "checkpointed layers": Case(model="llama", teacher="qwen3", algo=WHOLE, train={"gradient_checkpointing": True}),
    "a mixture": Case(model="llama", teacher="qwen3_moe", algo=WHOLE),
    "whole experts": Case(model="mixtral", teacher="qwen3_moe", algo=WHOLE, parallel={"expert": 2}),
    "dense beside whole experts": Case(model="qwen3_moe", teacher="llama", algo=WHOLE, parallel={"expert": 2}),
    "filled up": Case(model="llama", teacher="qwen3", algo=WHOLE, groups=((5, 1), (30, 1), (4, 4))),
}


@pytest.mark.parametrize("name", few(CASES, keep=4))
def test_two_ranks_have_the_gradient_of_one_device(name: str, two: RankProcesses) -> None:
    compare(two, CASES[name], 2e-5, least=1 if "filled up" in name else 2)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": 2, "replicate": 2}, {"shard": 2, "tensor": 2}])
def test_four_ranks_have_the_gradient_of_one_device(parallel: dict[str, int], four: RankProcesses) -> None:
    compare(four, Case(CASES["FSDP2"], groups=(*GROUPS, *GROUPS), parallel=parallel), 2e-5)


@pytest.mark.slow
def test_three_steps_end_at_the_weights_of_one_device(two: RankProcesses) -> None:
    compare_steps(two, CASES["FSDP2"], 0.5)
