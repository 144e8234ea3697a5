"""Layers that torch.compile has written, in ranks that split weights or rows: gradients of the eager ones, no graph for a length, and the same names."""

from __future__ import annotations

import pytest
from compiled_case import compiled_gradients
from rank_processes import RankProcesses
from sharded_case import Case, distance

from support import tiny_models

TENSOR = {"shard": 1, "tensor": 2}
CASES = {
    "qwen3": Case(model="qwen3"),
    "gemma3": Case(model="gemma3_text"),
    "a mixture": Case(model="qwen3_moe", routing=True),
    "whole experts": Case(model="mixtral", parallel={"expert": 2}),
    "rows together": Case(model="qwen3", parallel={"shard": 1, "context": 2}, train={"microbatch_tokens": 6}),
    "layers together": Case(model="qwen3", parallel=TENSOR),
    "layers together, windows": Case(model="gemma3_text", parallel=TENSOR),
    "layers together, a mixture": Case(model="qwen3_moe", routing=True, parallel=TENSOR),
    "checkpointed": Case(model="llama", train={"gradient_checkpointing": True}, parallel={"reduce": "step"}),
}


def compare(ranks: RankProcesses, case: Case, backend: str, tolerance: float) -> None:
    directory = tiny_models.saved(case["model"])
    names = sorted(name for name, _ in case.trainer(directory).parameters())
    for why_not, graphs, published, eager, found in ranks.run(compiled_gradients, directory, case, backend):
        assert why_not == "" and sorted(published) == names
        assert graphs <= 2  # of the head, for one loss token
        assert found[0] == pytest.approx(eager[0], rel=tolerance) and found[1] == pytest.approx(eager[1], rel=tolerance)
        assert distance(found[2], eager[2]) <= tolerance


@pytest.mark.slow  # 15 CPU s a rank: dynamo's tracing
@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_of_two_ranks_have_the_eager_gradients(name: str, two: RankProcesses) -> None:
    compare(two, CASES[name], "eager", 1e-5)


@pytest.mark.slow
def test_inductors_kernels_in_two_ranks_have_the_eager_gradients(two: RankProcesses) -> None:
    compare(two, CASES["qwen3"], "inductor", 1e-5)
