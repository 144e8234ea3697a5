"""What travels between ranks, and what each holds, counted and compared with the planner's formula."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses
from sharded_case import CPU, GROUPS, Case, trainer_of_rank
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.commands.plan.rates.mesh import Heads, rank_memory, traffic
from headrace.trainer.model.causal_lm import layers_of, load_model
from headrace.trainer.model.low_memory import local
from headrace.trainer.packing import Pack
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.step.trainer import TorchTrainer
from support import tiny_models


class Collectives(TorchDispatchMode):
    """Counts collectives on gradients and weights, and the bytes that they give this rank. Sums of numbers are in float64."""

    def __init__(self, mesh: ParallelConfig) -> None:
        super().__init__()
        context, alike = mesh.context, mesh.tensor if mesh.tensor > 1 else mesh.replicate
        ring = 2 * (alike - 1) / alike
        self._received = {
            "c10d::_allgather_base_": lambda output, given: output.nbytes - given.nbytes,
            "c10d::_reduce_scatter_base_": lambda output, given: given.nbytes - output.nbytes,
            "c10d::alltoall_base_": lambda output, given: (context - 1) / context * given.nbytes,
            "_c10d_functional::all_to_all_single": lambda given, rows: sum(rows) * given.shape[-1] * given.itemsize,
            "c10d::allreduce_": lambda given, *_: ring * sum(one.nbytes for one in given),
            "_c10d_functional::all_reduce": lambda given, *_: ring * given.nbytes,
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
    one = trainer_of_rank(directory, case)
    given = case.batch(0)
    plan = one._plans(given)[0]
    with Collectives(case.ranks) as collectives:
        one._gradient(given.temperature).fill(plan)
    return len(plan.packs), collectives.calls, collectives.bytes


def held(directory: Path, case: Case) -> int:
    """Bytes of weights, gradients and AdamW's state of this rank."""
    one = trainer_of_rank(directory, case)
    one.step(case.batch(0))
    learner, given = one._learners[""], case.batch(1)
    one._gradient(given.temperature).fill(one._plans(given)[0])
    parameters = list(learner.parameters.values())
    state = [value for kept in learner.optimizer.state.values() for name, value in kept.items() if name != "step"]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return sum(local(tensor).nbytes for tensor in (*parameters, *gradients, *state))


def parts(directory: Path, whole: bool = False) -> tuple[int, int, int]:
    """The layers of a model, their parameters, and all others. `whole`: without experts."""
    model = load_model(directory, CPU)
    layers = layers_of(model)
    inner = sum(p.numel() for layer in layers for p in layer.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if whole and ".experts." in name)
    return len(layers), inner - experts, sum(p.numel() for p in model.parameters()) - inner


def compare(ranks: RankProcesses, case: Case, near: float = 1e-6) -> None:
    directory = tiny_models.saved(case["model"])
    layers, inner, outer = parts(directory, case.ranks.expert > 1)
    expected = traffic(case.ranks, layers=layers, inner=inner, outer=outer)
    for microbatches, calls, found in ranks.run(counted, directory, case):
        assert microbatches >= 3
        assert calls["c10d::_allgather_base_"] == microbatches * expected.gathers
        reduced = 1 if case.ranks.reduce == "step" else microbatches
        assert calls["c10d::_reduce_scatter_base_"] == reduced * expected.reductions
        assert found["c10d::_allgather_base_"] == pytest.approx(microbatches * expected.gathered, rel=near)
        received = microbatches * expected.reduced + expected.summed
        assert found["c10d::_reduce_scatter_base_"] == pytest.approx(received, rel=near)
        if case.ranks.tensor == 1:
            assert found["c10d::allreduce_"] == pytest.approx(expected.copied, rel=near)


@pytest.mark.parametrize(
    "parallel",
    [{}, {"reshard": False}, {"gather": "bfloat16"}, {"reduce": "step"}],
    ids=["plain", "kept", "halved", "once"],
)
def test_what_travels_between_two_ranks_is_what_the_planner_says(parallel: dict[str, Any], two: RankProcesses) -> None:
    dtype = "bfloat16" if "gather" in parallel else "float32"
    compare(two, Case(model="llama", parallel=parallel, train={"dtype": dtype}))


def exchanged(directory: Path, case: Case) -> tuple[int, int]:
    """The tokens that this rank forwards, and the bytes that all-to-alls give it, its own included."""
    one = trainer_of_rank(directory, case)
    given = case.batch(0)
    plan = one._plans(given)[0]
    with Collectives(case.ranks) as collectives:
        one._gradient(given.temperature).fill(plan)
    return sum(len(pack.tokens) for pack in plan.packs), collectives.bytes["_c10d_functional::all_to_all_single"]


def test_whole_experts_are_never_gathered_and_tokens_travel_to_them(two: RankProcesses) -> None:
    case = Case(model="qwen3_moe", parallel={"expert": 2})
    compare(two, case)
    directory = tiny_models.saved("qwen3_moe")
    shape = load_model(directory, CPU).config
    width = shape.num_hidden_layers * shape.num_experts_per_tok * shape.hidden_size
    expected = traffic(case.ranks, layers=1, inner=0, outer=0, width=width, computed=4).exchanged
    tokens, found = map(sum, zip(*two.run(exchanged, directory, case), strict=True))
    assert found / 2 == pytest.approx(tokens * expected, rel=1e-6)  # of two ranks, half is a rank's own on average


def added(directory: Path, case: Case) -> tuple[list[tuple[int, int, int]], int, int]:
    """Tokens, places with targets and targets of each microbatch; all-reduces, and the bytes that they give this rank."""
    one = trainer_of_rank(directory, case)
    given = case.batch(0)
    plan = one._plans(given)[0]
    with Collectives(case.ranks) as collectives:
        one._gradient(given.temperature).fill(plan)
    names = ("c10d::allreduce_", "_c10d_functional::all_reduce")
    sizes = [(len(pack.tokens), len(set(pack.predictor.tolist())), len(pack.target)) for pack in plan.packs]
    return sizes, sum(collectives.calls[name] for name in names), sum(collectives.bytes[name] for name in names)


def test_what_ranks_of_a_tensor_group_add_up_is_what_the_planner_says(two: RankProcesses) -> None:
    case = Case(model="llama", parallel={"shard": 1, "tensor": 2})
    directory = tiny_models.saved("llama")
    layers, inner, outer = parts(directory)
    expected = traffic(case.ranks, layers=layers, inner=inner, outer=outer, hidden=32, computed=4)
    for sizes, calls, found in two.run(added, directory, case):
        assert len(sizes) >= 3
        assert calls == len(sizes) * expected.sums
        tokens, places, targets = map(sum, zip(*sizes, strict=True))
        # a place has one logit that its rank adds; some have several targets
        assert found == pytest.approx(tokens * expected.added + places * expected.scored + (targets - places) * 4)


@pytest.mark.slow
def test_what_is_gathered_beside_a_tensor_group_is_what_the_planner_says(four: RankProcesses) -> None:
    case = Case(model="llama", groups=(*GROUPS, *GROUPS), parallel={"shard": 2, "tensor": 2})
    compare(four, case, near=0.02)  # norms are whole in a tensor group


def attended(directory: Path, case: Case) -> tuple[int, int, Counter[str], Counter[str]]:
    """Microbatches, and the tokens that this rank forwards of them, those that fill up included."""
    one = trainer_of_rank(directory, case)
    given = case.batch(0)
    plan = one._plans(given)[0]
    with Collectives(case.ranks) as collectives:
        one._gradient(given.temperature).fill(plan)
    tokens = sum(-(-len(pack.tokens) // case.ranks.context) for pack in plan.packs)
    return len(plan.packs), tokens, collectives.calls, collectives.bytes


def compare_attention(ranks: RankProcesses, case: Case, gathers: bool) -> None:
    directory = tiny_models.saved(case["model"])
    layers, inner, outer = parts(directory)
    shape = load_model(directory, CPU).config
    heads = Heads(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    expected = traffic(case.ranks, layers=layers, inner=inner, outer=outer, computed=4, heads=heads)
    for microbatches, tokens, calls, found in ranks.run(attended, directory, case):
        assert microbatches >= 3
        once = microbatches * layers
        assert calls["c10d::alltoall_base_"] == (0 if gathers else 4 * once)
        assert calls["c10d::_allgather_base_"] == microbatches * expected.gathers + once * gathers
        assert calls["c10d::_reduce_scatter_base_"] == microbatches * expected.reductions + once * gathers
        received = (
            found["c10d::alltoall_base_"] + found["c10d::_allgather_base_"] + found["c10d::_reduce_scatter_base_"]
        )
        weights = microbatches * (expected.gathered + expected.reduced)
        assert received == pytest.approx(weights + tokens * expected.attended, rel=1e-6)


@pytest.mark.parametrize("model", ["qwen3", "nine-heads"])
def test_what_attention_brings_to_two_ranks_is_what_the_planner_says(model: str, two: RankProcesses) -> None:
    case = Case(model=model, parallel={"shard": 1, "context": 2}, train={"microbatch_tokens": 6})
    compare_attention(two, case, gathers=model == "nine-heads")


def checkpointed(directory: Path, case: Case) -> list[float]:
    """Bytes that all-to-alls give this rank, with activations kept and recomputed."""
    again = Case(case, train={**case["train"], "gradient_checkpointing": True})
    return [attended(directory, one)[3]["c10d::alltoall_base_"] for one in (case, again)]


def test_layers_that_are_computed_again_ask_for_half_as_much_again(two: RankProcesses) -> None:
    case = Case(model="qwen3", parallel={"shard": 1, "context": 2}, train={"microbatch_tokens": 6})
    for kept, again in two.run(checkpointed, tiny_models.saved("qwen3"), case):
        assert again == 1.5 * kept > 0


def activations(trainer: TorchTrainer, pack: Pack) -> int:
    """Bytes that a pack keeps for its backward pass, without weights and masks."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage, weight = (
            tensor.untyped_storage(),
            isinstance(tensor if tensor._base is None else tensor._base, Parameter),
        )
        if tensor.dtype.is_floating_point and tensor.requires_grad and not weight:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        scores = trainer._forward.logprobs(pack, 1.0, torch.float32)
    scores.logprob.sum().backward()
    return sum(kept.values())


def activations_of_rank(directory: Path, case: Case) -> int:
    one = trainer_of_rank(directory, case)
    return activations(one, one._plans(case.batch(0))[0].packs[0])


@pytest.mark.parametrize("model", ["qwen3", "nine-heads"])
def test_each_of_two_ranks_of_a_context_keeps_half_of_the_activations(model: str, two: RankProcesses) -> None:
    """Keys and values of all tokens are kept by each where they are gathered, and the width of these is a fifth of the rest."""
    directory = tiny_models.saved(model)
    case = Case(model=model, groups=((40, 2),), train={"microbatch_tokens": 100})
    alone = case.trainer(directory)
    whole = activations(alone, alone._plans(case.batch(0))[0].packs[0])
    for found in two.run(activations_of_rank, directory, Case(case, parallel={"shard": 1, "context": 2})):
        assert 0.4 * whole < found < (0.55 if model == "qwen3" else 0.65) * whole


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": 1, "context": 4}, {"shard": 2, "context": 2}], ids=["four", "split"])
@pytest.mark.parametrize("model", ["qwen3", "nine-heads"])
def test_what_attention_brings_to_four_ranks_is_what_the_planner_says(
    model: str, parallel: dict[str, int], four: RankProcesses
) -> None:
    train = {"microbatch_tokens": 12 // parallel["context"]}
    case = Case(model=model, parallel=parallel, train=train, groups=(*GROUPS, *GROUPS))
    compare_attention(four, case, gathers=model == "nine-heads")


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"shard": 4}, {"shard": 2, "replicate": 2}, {"shard": 2, "replicate": 2, "reduce": "step"}],
    ids=["split", "copies", "copies, once"],
)
def test_what_travels_between_four_ranks_is_what_the_planner_says(
    parallel: dict[str, int], four: RankProcesses
) -> None:
    compare(four, Case(model="llama", groups=(*GROUPS, *GROUPS), parallel=parallel))


@pytest.mark.parametrize("parallel", [{}, {"shard": 1, "tensor": 2}], ids=["shard", "tensor"])
def test_each_of_two_ranks_holds_half(parallel: dict[str, int], two: RankProcesses) -> None:
    case = Case(model="llama", parallel=parallel)
    directory = tiny_models.saved("llama")
    layers, inner, outer = parts(directory)
    expected = rank_memory(case.ranks, layers=layers, inner=inner, outer=outer).held
    assert expected == 8 * (inner + outer)
    for found in two.run(held, directory, case):
        assert found == pytest.approx(expected, rel=0.02 if parallel else 1e-6)  # norms are whole in a tensor group
