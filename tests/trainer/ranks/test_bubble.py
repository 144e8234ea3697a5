"""How long the ranks of a pipeline wait, what each holds, and what they send: counted, and compared with the planner's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rank_processes import RankProcesses
from sharded_case import CPU, Piped, trainer_of_rank
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.commands.plan.rates.mesh import in_flight, pipeline_memory, sent, waiting
from headrace.trainer.model.causal_lm import layers_of, load_model
from headrace.trainer.parallel import LOOPS, stages_of
from headrace.trainer.placement.staged import LeanStage, schedule_of
from support import tiny_models

Work = tuple[int, str, int]
"""Stage; forward (F), backward (B), or backward for the input (I) and for the weights (W); microbatch."""
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""A backward pass computes two products for each of a forward pass: for its input and for its weights."""


class Recorded(LeanStage):
    """Notes what torch's schedule asks of it."""

    def __init__(self, noted: list[Work], stage: int, stages: int) -> None:
        number, row = torch.zeros(1, 1), torch.zeros(1, 1, requires_grad=True)
        output = row if stage < stages - 1 else torch.zeros((), requires_grad=True)
        super().__init__(_Product(stage == stages - 1), stage, stages, CPU, row if stage else number, output)
        self._noted = noted

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._noted.append((self.stage_index, "F", fwd_chunk_id))
        there = [info.buffer for infos in self.args_recv_info.values() for info in infos if info.buffer is not None]
        assert sum(not buffer.is_meta for buffer in there) <= max(2, self.group_size), (
            "a buffer is made when it is filled, and let go when it was used"
        )
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        self._noted.append((self.stage_index, "B" if full_backward else "I", bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._noted.append((self.stage_index, "W", bwd_chunk_id))
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class _Product(torch.nn.Linear):
    def __init__(self, last: bool) -> None:
        super().__init__(1, 1)
        self._last = last

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given).sum() if self._last else super().forward(given)


def order_of(schedule: str, ranks: int, microbatches: int) -> list[Work]:
    """The work of this rank, in the order in which it was done."""
    noted: list[Work] = []
    mine = stages_of(torch.distributed.get_rank(), ranks, schedule)
    works = [Recorded(noted, stage, ranks * LOOPS[schedule]) for stage in mine]
    given = torch.zeros(microbatches, 1)
    first, last = 0 in mine, ranks * LOOPS[schedule] - 1 in mine
    schedule_of(schedule, works, microbatches).step(
        *([given] if first else []), target=given if last else None, return_outputs=False
    )
    return noted


def timed(order: dict[int, list[Work]], stages: int) -> tuple[float, int]:
    """The share of the time in which ranks wait, and the most stages whose activations the first one keeps, if every rank works
    as soon as it has what it needs."""
    done: dict[tuple[int, str, int], float] = {}
    left, free = {rank: list(actions) for rank, actions in order.items()}, dict.fromkeys(order, 0.0)
    while any(left.values()):
        before = len(done)
        for rank, actions in left.items():
            while actions:
                stage, kind, number = actions[0]
                needs = {
                    "F": [(stage - 1, "F")] if stage else [],
                    "W": [(stage, "I")],
                }.get(kind, [(stage, "F"), *([(stage + 1, "B"), (stage + 1, "I")] if stage < stages - 1 else [])])
                needed = [(one, of, number) for one, of in needs]
                of_next = [one for one in needed if one[1] in "BI" and kind != "W"]
                ready = all(one in done for one in needed if one not in of_next)
                if not ready or (of_next and not any(one in done for one in of_next)):
                    break
                start = max([free[rank], *(done[one] for one in needed if one in done)])
                done[actions.pop(0)] = free[rank] = start + COSTS[kind]
        assert len(done) > before, f"nobody can work: {[actions[:1] for actions in left.values()]}"
    work = sum(COSTS[kind] for actions in order.values() for _, kind, _ in actions)
    kept = most = 0
    for _, kind, _ in order[0]:
        kept += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        most = max(most, kept)
    return 1 - work / (len(order) * max(done.values())), most


def compare(ranks: RankProcesses, count: int, schedule: str, microbatches: int) -> None:
    order = dict(enumerate(ranks.run(order_of, schedule, count, microbatches)))
    found, kept = timed(order, count * LOOPS[schedule])
    assert found == pytest.approx(waiting(schedule, count, microbatches), rel=1e-9)
    assert kept / LOOPS[schedule] == in_flight(schedule, count, microbatches)


@pytest.mark.parametrize("schedule", LOOPS)
def test_two_ranks_wait_as_the_planner_says(schedule: str, two: RankProcesses) -> None:
    for microbatches in (2, 6, 16):
        compare(two, 2, schedule, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LOOPS)
def test_four_ranks_wait_as_the_planner_says(schedule: str, four: RankProcesses) -> None:
    for microbatches in (4, 8, 32):
        compare(four, 4, schedule, microbatches)


class Sends(TorchDispatchMode):
    """Counts the bytes of hidden states and their gradients that this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::send" and args[0][0].dtype == torch.float32:
            self.bytes += args[0][0].nbytes
        return func(*args, **(kwargs or {}))


class Counted(NamedTuple):
    microbatches: int
    longest: int
    sent: int
    held: int


def counted(directory: Path, case: Any) -> Counted:
    one = trainer_of_rank(directory, case)
    one.step(case.batch(0))
    given = case.batch(1)
    plan = one._plans(given)[0]
    with Sends() as sends:
        one._gradient(given.temperature).fill(plan)
    learner = one._learners[""]
    here = [p for p in learner.parameters.values() if not p.is_meta]
    state = [value for kept in learner.optimizer.state.values() for name, value in kept.items() if name != "step"]
    tensors = (*here, *state, *(p.grad for p in here if p.grad is not None))
    longest = max(len(pack.tokens) for pack in plan.packs)
    return Counted(len(plan.packs), longest, sends.bytes, sum(tensor.nbytes for tensor in tensors))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("name", ["llama-deep", "qwen3-deep"])
def test_ranks_hold_and_send_what_the_planner_says(name: str, schedule: str, two: RankProcesses) -> None:
    case = Piped(model=name, parallel={"schedule": schedule})
    directory = tiny_models.saved(name)
    model = load_model(directory, CPU)
    layers = layers_of(model)
    inner = sum(p.numel() for layer in layers for p in layer.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    shape = {"layers": len(layers), "inner": inner, "embedding": embedding.numel(), "head": head.numel()}
    expected = pipeline_memory(schedule, 2, tied=embedding is head, **shape)
    found = two.run(counted, directory, case)
    assert max(one.held for one in found) == pytest.approx(expected.held, rel=0.01)  # and a norm
    once = sent(schedule, 2, found[0].longest, head.shape[1])
    tied = 4 * head.numel() if embedding is head else 0
    assert sum(one.sent for one in found) == found[0].microbatches * once + tied
