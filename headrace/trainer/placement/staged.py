"""Ranks that form a pipeline: each holds some consecutive layers (`model_stages.py`), and microbatches pass from one to the next (`staged.py`).

The first stage has the embedding, the last one the last norm, the head and the loss. A matrix that is embedding and head at once lies on
both: the last sends its gradient to the first, which updates the matrix and sends it back, so that the two copies have the same bits.
Numbers that follow from log-probs are known to the ranks of the last stage only; all others have NaN in their place, which `sum`,
`largest`, `join` and `of_head` replace.

There may be several such pipelines (`replicate`, `shard`), each with its own microbatches. Those of `shard` hold the parts of one model: the ranks of
one place split its stages by FSDP2 (`sharded.py`), and gather a layer for each pass of a microbatch. Adapters of a frozen model are small: every
rank holds them whole, and has gradients of those in its own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from headrace.trainer.config import TrainConfig
from headrace.trainer.model.causal_lm import layers_of
from headrace.trainer.model.low_memory import local, make_optimizer
from headrace.trainer.model.outline import Region, hollow, is_outline, outline_or_model
from headrace.trainer.packing import DealtRows, StepPlan, fill_up, plan_of
from headrace.trainer.parallel import LOOPS, ParallelConfig, stages_of
from headrace.trainer.placement.filling import fill, part_of, piece_of
from headrace.trainer.placement.model_stages import Chain, ModelStage, Stages, try_cut
from headrace.trainer.placement.port import Microbatches, Placement, T, TensorPiece
from headrace.trainer.placement.rendezvous import of_leader
from headrace.trainer.placement.sharded import Sharded, kept_whole, split_layers

# --- The microbatches of a step through the stages of a pipeline
# The microbatches of a step through the stages of a pipeline, in the order of one of torch's schedules.
#
#     gpipe         all forward passes, then all backward passes (arXiv 1811.06965)
#     1f1b          as soon as a stage has work for it, one backward after each forward: fewer activations are kept (arXiv 2006.09503)
#     interleaved   1f1b with two stages a rank: a shorter start and end, twice the traffic (arXiv 2104.04473)
#     zero_bubble   interleaved, and gradients of weights are computed where a rank would wait (arXiv 2401.10241)
#
# torch wants every microbatch to send a tensor of one shape. Ours have different numbers of tokens: what is sent is filled up to the longest,
# and cut again before anything is computed, so filling costs no computation and has no gradient.


SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class _Work(torch.nn.Module):
    """One stage as torch's schedules call it."""

    def __init__(
        self, stages: Stages, stage: ModelStage, lengths: Sequence[int], compute: Callable[[int, bool], Tensor | None]
    ):
        super().__init__()
        self._stages, self._stage, self._lengths, self._compute = stages, stage, lengths, compute

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The parameters that zero-bubble schedules compute gradients of."""
        for module in self._stage.modules:
            yield from (p for p in module._parameters.values() if p is not None and p.requires_grad)

    def forward(self, received: Tensor, number: Tensor) -> Tensor:
        """received [longest, H] (the first stage: anything), number [1] -> [longest, H], or the loss."""
        count, last = self._lengths[int(number)], self._stage.number == self._stages.count - 1
        given = received[:count] if self._stage.number else None
        with self._stages.passing(self._stage, given) as done:
            loss = self._compute(int(number), last)
        if last:
            assert loss is not None
            return loss
        hidden = torch.cat([result[0] for result in done.results])
        assert hidden.dtype == self._stages.dtype, f"hidden states in {hidden.dtype}"
        return torch.nn.functional.pad(hidden, (0, 0, 0, max(self._lengths) - count))


class LeanStage(PipelineStage):
    """torch's stage, without a buffer for every microbatch of the step: at 122 microbatches of 16,384 tokens of a model with 70 billion
    parameters these would take 131 GB on every rank. Each is made when it is about to be filled, and let go when it was used."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._make(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _let_go(self.args_recv_info[fwd_chunk_id])  # autograd keeps what the backward pass needs
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _let_go(self.grad_recv_info[bwd_chunk_id])

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._without_memory():
            super()._setup_backward_recv_info(num_microbatches)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        own, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = own

    def _make(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device)


def _let_go(infos: Sequence[Any]) -> None:
    for info in infos:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device="meta")


def run_schedule(
    name: str,
    stages: Stages,
    work: Microbatches,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Adds the gradients of all microbatches to the parameters of this rank's stages. Every rank of `group`, a pipeline, calls it."""
    lengths = [len(pack.tokens) for pack in work.packs]

    def compute(number: int, last: bool) -> Tensor | None:
        if not last:
            with work.precision():
                work.body(number)
            return None
        with work.precision(), work.loss(number) as loss:
            return loss

    numbers = torch.arange(len(lengths), device=device)
    sent = torch.empty(max(lengths), stages.width, dtype=stages.dtype, device="meta", requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    works = [
        LeanStage(
            _Work(stages, stage, lengths, compute),
            stage.number,
            stages.count,
            device,
            input_args=sent if stage.number else numbers[:1],
            output_args=sent if stage.number < stages.count - 1 else loss,
            group=group,
        )
        for stage in stages.mine
    ]
    given = [numbers] if any(work.is_first for work in works) else []
    target = numbers if any(work.is_last for work in works) else None
    schedule_of(name, works, len(lengths)).step(*given, number=numbers, target=target, return_outputs=False)


def schedule_of(name: str, works: Sequence[PipelineStage], microbatches: int) -> Any:
    """torch's schedule of a rank's stages. The last of all stages returns the loss of a microbatch; gradients are summed."""
    stages = list(works) if LOOPS[name] > 1 else works[0]
    return SCHEDULES[name](stages, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False)


# --- staged ------------------------------------------------------------


class Staged:
    """Protocol `Placement`. The processes have met already (`rendezvous.py`)."""

    plain = False
    context = None

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.parallel, self._device = config, device
        assert dist.get_world_size() == config.ranks, f"{dist.get_world_size()} processes have met"
        sizes = (config.pipeline, config.replicate, config.shard)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pipeline", "replicate", "shard"))
        self._line, self._replicas, self._shards = (
            mesh.get_group("pipeline"),
            mesh.get_group("replicate"),
            mesh["shard"],
        )
        self._alike = mesh["replicate", "shard"]._flatten("alike").get_group()
        """The ranks of the same place, which have other microbatches."""
        self._place, self._copy = mesh.get_local_rank("pipeline"), dist.get_rank(self._alike)
        assert self._copy == config.share_of(dist.get_rank()), "the controller sends each pipeline one share"
        self._chain = Chain(self._line)
        self._stages: Stages | None = None
        """Stages of the model that is trained; None until it is spread."""
        self._beside: set[torch.nn.Parameter] = set()
        """Parameters that every rank holds whole: adapters."""
        self._tied: list[torch.nn.Parameter] = []
        """Parameters that the first and the last stage share."""

    @property
    def leads(self) -> bool:
        return dist.get_rank() == 0

    @property
    def _last(self) -> bool:
        """Whether this rank has the head."""
        return self._place == self.parallel.pipeline - 1

    def load(self, directory: Path, device: torch.device, *, values: bool) -> Any:
        """Values are loaded into the host's memory: a device never holds more than its stages."""
        return outline_or_model(directory, values=values)

    def of_leader(self, compute: Callable[[], T]) -> T:
        return of_leader(compute)

    def spread(self, model: Any) -> None:
        config = self.parallel
        count = config.pipeline * LOOPS[config.schedule]
        mine = stages_of(self._place, config.pipeline, config.schedule)
        if is_outline(model):
            self.of_leader(lambda: try_cut(model, count))
            hollow(model)
        stages = Stages(model, count, mine, self._chain, tried=is_outline(model))
        beside = kept_whole(model)
        adapters = beside if any(not p.requires_grad for p in model.parameters()) else set()
        stages.hold(self._device, adapters)
        if config.shard > 1:
            gone = {p for p in model.parameters() if p.is_meta}
            here = [layer for layer in layers_of(model) if not gone.intersection(layer.parameters())]
            split_layers(model, here, self._shards, config, without=gone | beside)
        if is_outline(model):
            fill(model, self._device)
        if self._stages is None:
            self._stages, self._beside = stages, adapters
            both = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
            if both[0] is both[1] and both[0].requires_grad and self._place in (0, config.pipeline - 1):
                self._tied = both[:1]

    def optimizer(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters, config)
        if self._tied:
            optimizer.register_step_post_hook(lambda stepped, args, kwargs: self._share_tied(stepped))
        return optimizer

    @property
    def share(self) -> int:
        return self._copy

    def plan(self, rows: DealtRows) -> StepPlan:
        """The microbatches of this pipeline: at least two, and as many as its schedule can order."""
        plan = plan_of(rows)
        multiple = 1 if LOOPS[self.parallel.schedule] == 1 else self.parallel.pipeline
        return fill_up(plan, least=2, multiple=multiple)

    def accumulate(self, work: Microbatches) -> None:
        assert self._stages is not None
        run_schedule(
            self.parallel.schedule,
            self._stages,
            work,
            group=self._line,
            device=self._device,
        )
        for tied in self._tied:
            self._add_tied(tied)
        _add_up([p for p in work.parameters if p in self._beside], dist.group.WORLD)
        held = [p for p in work.parameters if p not in self._beside and not p.is_meta]
        _add_up([p for p in held if not isinstance(p, DTensor)], self._alike)
        _add_up([p for p in held if isinstance(p, DTensor)], self._replicas)

    def _add_tied(self, tied: torch.nn.Parameter) -> None:
        """Adds the last stage's gradient to the first's."""
        if tied.grad is None:
            tied.grad = torch.zeros_like(tied)
        if self._last:
            dist.send(local(tied.grad), group=self._line, group_dst=0)
            tied.grad = None
            return
        received = torch.empty_like(local(tied.grad))
        dist.recv(received, group=self._line, group_src=self.parallel.pipeline - 1)
        local(tied.grad).add_(received)

    def _share_tied(self, optimizer: torch.optim.Optimizer) -> None:
        """Sends the updated matrix from the first stage to the last, which keeps no optimizer's state of it."""
        for tied in self._tied:
            if self._last:
                dist.recv(local(tied.data), group=self._line, group_src=0)
                optimizer.state.pop(tied, None)  # a checkpoint may have restored it
            else:
                dist.send(local(tied.data), group=self._line, group_dst=self.parallel.pipeline - 1)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone() if self._last else torch.zeros_like(values)
        dist.all_reduce(total)
        return total

    def largest(self, values: Tensor) -> Tensor:
        most = values.clone() if self._last else torch.full_like(values, -torch.inf)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most

    def join(self, columns: Tensor) -> tuple[Tensor, slice]:
        everyone: list[Any] = [None] * self.parallel.batches
        dist.all_gather_object(everyone, self.of_head(columns).cpu(), group=self._alike)
        start = sum(part.shape[1] for part in everyone[: self._copy])
        return torch.cat(everyone, 1).to(columns.device), slice(start, start + columns.shape[1])

    def of_head(self, values: Tensor) -> Tensor:
        known = values.contiguous()
        dist.broadcast(known, group=self._line, group_src=self.parallel.pipeline - 1)
        return known

    def each(self, values: Tensor) -> tuple[Tensor, int]:
        found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(found, values)
        return torch.stack(found), dist.get_rank()

    def norm(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        squares = _square([local(g) for p, g in gradients.items() if isinstance(p, DTensor)])
        dist.all_reduce(squares, group=self._shards.get_group())
        squares += _square([g for p, g in gradients.items() if not isinstance(p, DTensor) and p not in self._beside])
        dist.all_reduce(squares, group=self._line)
        beside = _square([g for p, g in gradients.items() if p in self._beside])
        return (squares + beside).sqrt().to(self._device)

    def clip(self, parameters: Sequence[torch.nn.Parameter], norm: Tensor, most: float) -> None:
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, most / (float(norm) + 1e-6))  # as torch.nn.utils.clip_grads_with_norm_

    def whole(self, tensor: Tensor) -> Tensor:
        """A copy from the first rank of the pipeline that has it."""
        have = torch.tensor(self.parallel.pipeline if tensor.is_meta else self._place)
        dist.all_reduce(have, dist.ReduceOp.MIN, group=self._line)
        found = torch.empty_like(tensor, device=self._device) if tensor.is_meta else _together(tensor)
        dist.broadcast(found, group=self._line, group_src=int(have))
        return found

    def part(self, read: Callable[[Region | None], Tensor], like: Tensor) -> Tensor:
        if isinstance(like, DTensor):
            return part_of(read, like)
        return torch.empty_like(like) if like.is_meta else read(None)

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorPiece]:
        """The first rank of the first pipeline that holds a tensor, or a part of it, writes it."""
        held = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        known: list[Any] = [None] * self.parallel.pipeline
        dist.all_gather_object(known, list(held), group=self._line)
        before = {name for names in known[: self._place] for name in names}
        found: dict[str, TensorPiece] = {}
        for name, tensor in held.items():
            if name in before or dist.get_rank(self._replicas):
                continue
            if (piece := piece_of(tensor) if isinstance(tensor, DTensor) else None) is not None:
                found[name] = piece
            elif not isinstance(tensor, DTensor) and not self._copy:
                found[name] = TensorPiece(tensor)
        return found


def _together(tensor: Tensor) -> Tensor:
    """All values of a tensor that the ranks of this place hold."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()


def _add_up(parameters: Sequence[torch.nn.Parameter], group: Any) -> None:
    """Sums the gradients of parameters that every rank of the group holds."""
    if not parameters or dist.get_world_size(group) == 1:
        return
    have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=parameters[0].device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    for parameter, there in zip(parameters, have.tolist(), strict=True):
        if there:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(local(parameter.grad), group=group)


def _square(tensors: Sequence[Tensor | None]) -> Tensor:
    """The sum of squares, in float64."""
    there = [tensor for tensor in tensors if tensor is not None]
    if not there:
        return torch.zeros((), dtype=torch.float64)
    return torch.nn.utils.get_total_norm(there, foreach=True).double().square().cpu()


def placement_of(parallel: ParallelConfig, device: torch.device) -> Placement:
    """Returns the placement of one of several ranks, which have met already."""
    return Staged(parallel, device) if parallel.pipeline > 1 else Sharded(parallel, device)
