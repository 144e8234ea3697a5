"""The fake: ranks that are threads of one process, each of which holds some rows of every parameter, as FSDP does.

The other rows are NaN except while the root module is called, and until the backward pass that follows is over. So a weight that is read
outside of the root's call, a gradient that is not summed, and a tensor that is saved or published without `whole` show at once. Ranks that
make different calls, or a different number of them, end with an error and not with a hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.trainer.config import TrainConfig
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import make_optimizer
from headrace.trainer.model.outline import Region
from headrace.trainer.packing import DealtRows, StepPlan, plan_of
from headrace.trainer.parallel import ParallelConfig
from headrace.trainer.placement.port import Microbatches, TensorPiece

T = TypeVar("T")
DEADLINE = 600.0
"""Seconds that a rank waits for the others."""

_LOADING = threading.Lock()
"""transformers loads one model at a time: two threads that do lose track of tied weights."""


class Ring:
    """The object through which ranks exchange values."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._given: list[tuple[str, Any]] = [("", None)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=DEADLINE)

    def exchange(self, rank: int, call: str, value: T) -> list[T]:
        """The values of all ranks, in their order. `call` names what the rank is doing; it must be the same on all."""
        self._given[rank] = call, value
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        assert len({name for name, _ in given}) == 1, f"ranks do different things: {[name for name, _ in given]}"
        return [value for _, value in given]

    def run(self, work: Callable[[Simulated], T]) -> list[T]:
        """Calls `work` on every rank at once. Raises the first error of any, after all have ended."""

        def guarded(rank: int) -> T:
            try:
                return work(Simulated(rank, self))
            except BaseException:
                self._barrier.abort()  # the others wait for this rank
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            done = [pool.submit(guarded, rank) for rank in range(self.ranks)]
        failed = [future.exception() for future in done]
        for error in sorted(filter(None, failed), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in done]


class Simulated:
    """Protocol `Placement`."""

    plain = False
    context = None

    def __init__(self, rank: int, ring: Ring) -> None:
        self._rank, self._ring = rank, ring
        self.parallel, self.share = ParallelConfig(shard=ring.ranks), rank
        self._held: list[torch.nn.Parameter] = []
        """The parameters that lie in parts."""

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def load(self, directory: Path, device: torch.device, *, values: bool) -> Any:
        with _LOADING:
            return load_model(directory, device)

    def of_leader(self, compute: Callable[[], T]) -> T:
        return self._exchange("of_leader", compute() if self.leads else None)[0]  # type: ignore[return-value]

    def spread(self, model: Any) -> None:
        held = list(model.parameters())
        self._held += held

        def gather(module: Any, args: Any) -> None:
            for parameter in held:
                parameter.data.copy_(self.whole(parameter))

        def scatter(module: Any, args: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                self._scatter(held)

        model.register_forward_pre_hook(gather)
        model.register_forward_hook(scatter)
        self._scatter(held)

    def optimizer(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> torch.optim.Optimizer:
        return make_optimizer(parameters, config)

    def plan(self, rows: DealtRows) -> StepPlan:
        return plan_of(rows)

    def accumulate(self, work: Microbatches) -> None:
        for number in range(len(work.packs)):
            with work.precision(), work.loss(number) as loss:
                loss.backward()
            self._scatter(self._held)
        for parameter in work.parameters:
            given = [tensor for tensor in self._exchange("gradient", parameter.grad) if tensor is not None]
            if given:
                total = torch.stack(given).sum(0)
                lies_in_parts = any(parameter is held for held in self._held)
                parameter.grad = self._own(total) if lies_in_parts else total

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange("sum", values)).sum(0)

    def largest(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange("largest", values)).amax(0)

    def join(self, columns: Tensor) -> tuple[Tensor, slice]:
        given = self._exchange("join", columns)
        start = sum(tensor.shape[1] for tensor in given[: self._rank])
        return torch.cat(given, 1), slice(start, start + columns.shape[1])

    def of_head(self, values: Tensor) -> Tensor:
        return values

    def each(self, values: Tensor) -> tuple[Tensor, int]:
        return torch.stack(self._exchange("each", values)), self._rank

    def norm(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        mine = [p.grad[self._rows(p)] for p in parameters if p.grad is not None]
        return self.sum(torch.nn.utils.get_total_norm(mine) ** 2).sqrt()

    def clip(self, parameters: Sequence[torch.nn.Parameter], norm: Tensor, most: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)

    def whole(self, tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor.detach()
        return torch.cat(self._exchange(f"whole {tuple(tensor.shape)}", tensor.detach()[self._rows(tensor)]))

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorPiece]:
        found = {name: TensorPiece(tensor) for name, tensor in tensors.items() if not tensor.ndim and self.leads}
        for name, tensor in tensors.items():
            if tensor.ndim and len(mine := tensor[self._rows(tensor)]):
                start = self._rows(tensor).start
                region = [[(start, start + len(mine))], *([(0, size)] for size in tensor.shape[1:])]
                found[name] = TensorPiece(mine, region, tensor.shape)
        return found

    def part(self, read: Callable[[Region | None], Tensor], like: Tensor) -> Tensor:
        return self._own(read(None))

    def _exchange(self, call: str, value: T) -> list[T]:
        return self._ring.exchange(self._rank, call, value)

    def _rows(self, tensor: Tensor) -> slice:
        """The rows of a tensor [n, ...] that this rank holds: nearly as many on each, or none if there are too few."""
        count, ranks = len(tensor), self._ring.ranks
        return slice(count * self._rank // ranks, count * (self._rank + 1) // ranks)

    def _own(self, whole: Tensor) -> Tensor:
        own, rows = torch.full_like(whole, torch.nan), self._rows(whole)
        own[rows] = whole[rows]
        return own

    def _scatter(self, held: Sequence[torch.nn.Parameter]) -> None:
        """Waits until every rank has gathered. Then a rank may forget the parts that it does not hold."""
        self._exchange("scatter", None)
        for parameter in held:
            parameter.data.copy_(self._own(parameter.data))
