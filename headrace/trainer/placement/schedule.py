"""The microbatches of a step through the stages of a pipeline, in the order of one of torch's schedules.

    gpipe         all forward passes, then all backward passes (arXiv 1811.06965)
    1f1b          as soon as a stage has work for it, one backward after each forward: fewer activations are kept (arXiv 2006.09503)
    interleaved   1f1b with two stages a rank: a shorter start and end, twice the traffic (arXiv 2104.04473)
    zero_bubble   interleaved, and gradients of weights are computed where a rank would wait (arXiv 2401.10241)

torch wants every microbatch to send a tensor of one shape. Ours have different numbers of tokens: what is sent is filled up to the longest,
and cut again before anything is computed, so filling costs no computation and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from headrace.trainer.placement.cutting import LOOPS
from headrace.trainer.placement.model_stages import ModelStage, Stages
from headrace.trainer.placement.port import Microbatches

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
        """Those that zero-bubble schedules compute gradients of."""
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
