"""One device that holds everything: each method is the plain torch call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.trainer.config import TrainConfig
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import make_optimizer
from headrace.trainer.packing import StepPlan, StepRows, pack_rows
from headrace.trainer.placement.port import Keep, Microbatches, on_host


@dataclass(frozen=True)
class Single:
    """Protocol `Placement`."""

    leads: bool = True
    plain: bool = True
    context: None = None

    def load(self, directory: Path, device: torch.device) -> Any:
        return load_model(directory, device)

    def spread(self, model: Any) -> None:
        """Leaves the model where it is."""

    def optimizer(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> torch.optim.Optimizer:
        return make_optimizer(parameters, config)

    def plan(self, rows: StepRows) -> StepPlan:
        return pack_rows(rows)

    def accumulate(self, work: Microbatches) -> None:
        for number in range(len(work.packs)):
            with work.precision(), work.loss(number) as loss:
                loss.backward()

    def sum(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def join(self, columns: Tensor) -> tuple[Tensor, slice]:
        return columns, slice(None)

    def of_head(self, values: Tensor) -> Tensor:
        return values

    def each(self, values: Tensor) -> tuple[Tensor, int]:
        return values[None], 0

    def norm(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)

    def clip(self, parameters: Sequence[torch.nn.Parameter], norm: Tensor, most: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=True)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def gather(self, tensors: Mapping[str, Tensor], keep: Keep = on_host) -> dict[str, Tensor]:
        return {name: keep(name, tensor) for name, tensor in tensors.items()}

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        return whole
