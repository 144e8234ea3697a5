"""What travels between ranks, and what each holds, counted and compared with the planner's formula."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from rank_processes import RankProcesses
from sharded_case import CPU, GROUPS, Case, sharded
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.plan.rates.mesh import rank_memory, traffic
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import local
from headrace.trainer.placement.sharded import layers_of


class Collectives(TorchDispatchMode):
    """Counts collectives on gradients and weights, and the bytes that they give this rank. Sums of numbers are in float64."""

    def __init__(self, shard: int, replicate: int) -> None:
        super().__init__()
        self._received = {
            "c10d::_allgather_base_": lambda output, given: (shard - 1) * given.nbytes,
            "c10d::_reduce_scatter_base_": lambda output, given: (shard - 1) * output.nbytes,
            "c10d::allreduce_": lambda given, *_: 2 * (replicate - 1) / replicate * sum(one.nbytes for one in given),
        }
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in self._received:
            first = args[0][0] if isinstance(args[0], list) else args[0]
            if first.dtype != torch.float64:
                self.calls[name] += 1
                self.bytes[name] += self._received[name](*args[:2])
        return func(*args, **(kwargs or {}))


def counted(directory: Path, case: Case) -> tuple[int, Counter[str], Counter[str]]:
    one = sharded(directory, case)
    given = case.batch(0)
    plan = one._plan(given)
    with Collectives(case.ranks.shard, case.ranks.replicate) as collectives:
        one._gradients(plan, given.temperature)
    return len(plan.packs), collectives.calls, collectives.bytes


def held(directory: Path, case: Case) -> int:
    """Bytes of weights, gradients and AdamW's state of this rank."""
    one = sharded(directory, case)
    one.step(case.batch(0))
    learner, given = one._learners[""], case.batch(1)
    one._gradients(one._plan(given), given.temperature)
    parameters = list(learner.parameters.values())
    state = [value for kept in learner.optimizer.state.values() for name, value in kept.items() if name != "step"]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return sum(local(tensor).nbytes for tensor in (*parameters, *gradients, *state))


def parts(directory: Path) -> tuple[int, int, int]:
    """The layers of a model, their parameters, and all others."""
    model = load_model(directory, CPU)
    layers = layers_of(model)
    inner = sum(p.numel() for layer in layers for p in layer.parameters())
    return len(layers), inner, sum(p.numel() for p in model.parameters()) - inner


def compare(ranks: RankProcesses, case: Case) -> None:
    directory = tiny_models.saved(case["model"])
    layers, inner, outer = parts(directory)
    expected = traffic(case.ranks, layers=layers, inner=inner, outer=outer)
    for microbatches, calls, found in ranks.run(counted, directory, case):
        assert microbatches >= 3
        assert calls["c10d::_allgather_base_"] == microbatches * expected.gathers
        assert calls["c10d::_reduce_scatter_base_"] == microbatches * expected.reductions
        assert found["c10d::_allgather_base_"] == pytest.approx(microbatches * expected.gathered, rel=1e-6)
        assert found["c10d::_reduce_scatter_base_"] == pytest.approx(microbatches * expected.reduced, rel=1e-6)
        assert found["c10d::allreduce_"] == pytest.approx(expected.copied, rel=1e-6)
        assert sum(found.values()) == pytest.approx(expected.step(microbatches), rel=1e-6)


@pytest.mark.parametrize("parallel", [{}, {"reshard": False}, {"gather": "bfloat16"}], ids=["plain", "kept", "halved"])
def test_what_travels_between_two_ranks_is_what_the_planner_says(parallel: dict[str, Any], two: RankProcesses) -> None:
    dtype = "bfloat16" if "gather" in parallel else "float32"
    compare(two, Case(model="llama", parallel=parallel, train={"dtype": dtype}))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": 4}, {"shard": 2, "replicate": 2}], ids=["split", "copies"])
def test_what_travels_between_four_ranks_is_what_the_planner_says(
    parallel: dict[str, int], four: RankProcesses
) -> None:
    compare(four, Case(model="llama", groups=(*GROUPS, *GROUPS), parallel=parallel))


def test_each_of_two_ranks_holds_half(two: RankProcesses) -> None:
    case = Case(model="llama")
    directory = tiny_models.saved("llama")
    layers, inner, outer = parts(directory)
    expected = rank_memory(case.ranks, layers=layers, inner=inner, outer=outer).held
    assert expected == 8 * (inner + outer)
    for found in two.run(held, directory, case):
        assert found == pytest.approx(expected, rel=1e-6)
