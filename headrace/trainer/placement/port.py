"""The port between the trainer and the placement of its weights.

Every operation that needs a collective, or the whole of a tensor that may be split over ranks, goes through it: so a new way
to distribute a model is a new implementation of this protocol, without a branch anywhere else. On one device every method is a
plain torch call (`port.py`).

    load      load, of_leader, spread           the model as it was saved, and as it lies in training
    split     plan, accumulate                  the microbatches of this rank, and the gradients of the whole step
    sum       sum, largest, join                numbers, and columns of tokens, of all ranks
    know      of_head, each                     numbers that another rank has
    norm      norm, clip                        of the whole gradient
    gather    whole                             for exports and the weight sender
    keep      pieces, part                      the part of each tensor that this rank writes into a checkpoint, and reads from one
    optimizer                                   its state lies where the parameters lie, and is kept like them

All but `leads`, `plain`, `context` and `part` are collective: every rank calls them, in one order, with the same parameters. Gradients are sums over
ranks, never means (C9). The forward pass runs within the call of the root module (`forward/forward.py`), and the head's matrix is read within
the call of the head, so that hooks which gather parameters have fired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headrace.trainer.config import TrainConfig
from headrace.trainer.forward.context import Context
from headrace.trainer.forward.forward import Forward, forward_of, together, way_of
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.model.low_memory import make_optimizer
from headrace.trainer.model.outline import Region, is_outline, sample
from headrace.trainer.packing import DealtRows, Pack, StepPlan, plan_of
from headrace.trainer.parallel import ParallelConfig

T = TypeVar("T")

Microbatch = Callable[[int], AbstractContextManager[Tensor]]
"""The loss of the microbatch of this number, a scalar with gradient. Its backward pass belongs inside the context."""

Body = Callable[[int], object]
"""Computes the hidden states of the microbatch of this number: all that a rank without the head does."""

Precision = Callable[[], AbstractContextManager[Any]]
"""A fresh autocast context (`causal_lm.computed_in`)."""


@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """The work of this rank in one optimizer step."""

    packs: Sequence[Pack]
    loss: Microbatch
    body: Body
    precision: Precision
    parameters: Sequence[torch.nn.Parameter]
    """Parameters whose gradients are wanted."""


class TensorPiece(NamedTuple):
    """The part of a tensor that a rank writes."""

    values: Tensor
    region: Region | None = None
    """The places of the values in the whole tensor; None: they are the whole."""
    shape: Sequence[int] = ()
    """The shape of the whole tensor, if the values are a part."""


Keep = Callable[[str, Tensor], Tensor]
"""Takes a tensor, by its name, into the host's memory."""


def on_host(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself if it is in the host's memory, else a copy."""
    return tensor.detach().cpu()


class Placement(Protocol):
    @property
    def leads(self) -> bool:
        """Whether this process writes files and publishes. One of all ranks does."""

    @property
    def plain(self) -> bool:
        """Whether parameters are ordinary tensors that hold all of their values at any time, so that C++ kernels may read them."""

    @property
    def context(self) -> Context | None:
        """The ranks that compute each microbatch together with this one; None: it computes its own alone."""

    def load(self, directory: Path, device: torch.device, *, values: bool) -> Any:
        """The model in float32, as `causal_lm.load_model`, or its outline (`outline.py`) if its `values` are not needed before `spread`, which then reads
        this rank's part of them. The device is that of `spread`."""

    def of_leader(self, compute: Callable[[], T]) -> T:
        """The result of a computation that the rank that leads makes for all. Raises its ConfigError on all of them."""

    def spread(self, model: Any) -> None:
        """Gives each rank its part of a model that is complete: its adapters are added, its weights lowered. Its parameters may be
        other objects afterwards. Called before an optimizer is made, for a reference model too. Raises ConfigError for a model that
        cannot be placed this way."""

    def optimizer(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> torch.optim.Optimizer: ...

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def share(self) -> int:
        """The number of the share that this rank has of a step (`ParallelConfig.share_of`)."""

    def plan(self, rows: DealtRows) -> StepPlan:
        """The microbatches of this rank's share. All ranks have the same number of them."""

    def accumulate(self, work: Microbatches) -> None:
        """Adds the gradients of all microbatches of all ranks in the `grad` of the parameters.

        It is the placement that loops, because a pipeline has an order of its own. Each microbatch runs, forward and backward, in an
        autocast context of its own: a context that spans several keeps lowered copies of weights, and where parameters are gathered
        anew for every pass these are stale (FSDP2 of torch 2.13, three microbatches: gradients wrong by up to 53 %). Weights that stay where
        they are have copies for the whole step (`forward/lowered.py`), which autocast finds lowered already.
        """

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise over the ranks' microbatches; float64 on the CPU. A microbatch that several ranks compute together counts once."""

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum, otherwise as `sum`."""

    def join(self, columns: Tensor) -> tuple[Tensor, slice]:
        """[c, M of this rank] -> ([c, M of the step], which of them are this rank's). Microbatches count as for `sum`."""

    def of_head(self, values: Tensor) -> Tensor:
        """Numbers that follow from log-probs, in the same shape, from a rank that has the head. A rank without it has NaN in
        their place."""

    def each(self, values: Tensor) -> tuple[Tensor, int]:
        """[n] -> ([R, n] those of every rank, which of them is this one)."""

    def norm(self, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        """The 2-norm of the whole gradient, a plain scalar that is the same on all ranks."""

    def clip(self, parameters: Sequence[torch.nn.Parameter], norm: Tensor, most: float) -> None:
        """Scales gradients of the given norm down to `most`."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All values of a parameter, of its moments, or of a buffer, without gradient; the tensor itself if this rank holds
        all of it."""

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorPiece]:
        """The parts of these tensors that this rank writes, where they lie; every value is written by one rank. Ranks may have tensors of their own: moments of
        parameters that the rest has not."""

    def part(self, read: Callable[[Region | None], Tensor], like: Tensor) -> Tensor:
        """This rank's part of a tensor. `read`: reads a region of it, or all (None). `like`: the parameter or buffer that it belongs to."""


# --- One device that holds everything: each method is the plain torch call.


@dataclass(frozen=True)
class Single:
    """Protocol `Placement`."""

    leads: bool = True
    plain: bool = True
    context: None = None
    parallel: ParallelConfig = ParallelConfig()
    share: int = 0

    def load(self, directory: Path, device: torch.device, *, values: bool) -> Any:
        return load_model(directory, device)

    def of_leader(self, compute: Callable[[], T]) -> T:
        return compute()

    def spread(self, model: Any) -> None:
        """Leaves the model where it is."""

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

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorPiece]:
        return {name: TensorPiece(tensor) for name, tensor in tensors.items()}

    def part(self, read: Callable[[Region | None], Tensor], like: Tensor) -> Tensor:
        return read(None)


# --- What a model that a placement has loaded shows, before it is spread


def tried(placement: Placement, model: Any, trial: Callable[[Any], T]) -> T:
    """Returns what a trial of the model finds out; of an outline, a trial that one rank makes with its first layers."""
    if not is_outline(model):
        return trial(model)

    def alone() -> T:
        with sample(model):
            return trial(model)

    return placement.of_leader(alone)


def chosen_forward(placement: Placement, model: Any, *, checkpointed: bool) -> Forward:
    """The way in which the ranks run the model (`forward.choose_forward`). Raises ConfigError where they cannot compute microbatches together."""
    # transformers keeps no cache in layers that are checkpointed, and a rank must call each layer as often as the others
    may_carry = placement.plain and not checkpointed
    return together(forward_of(model, tried(placement, model, lambda one: way_of(one, may_carry))), placement.context)


# --- The values that a rank publishes without gathering them
# The rows of split parameters that it holds.


def own_values_of(
    parameters: Iterable[tuple[str, Tensor]], rank: int, ranks: int, whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yields name, number of the first value in row-major order, and values [n], of all that this rank publishes.

    `whole`: gathers what is split otherwise than by rows, or lies on another stage (`Placement.whole`), one tensor at a time; such tensors, and those that every rank
    holds, lie with one rank after another. Every rank calls this at the same time.
    """
    given = list(parameters)
    staged = any(parameter.is_meta for _, parameter in given)  # ranks of other stages wait for each tensor
    for number, (name, parameter) in enumerate(given):
        if isinstance(parameter, DTensor) and _by_rows(parameter) and not staged:
            first, values = _own_rows(parameter)
            if values.numel():
                yield name, first, values
            continue
        tensor = whole(parameter)
        if number % ranks == rank:
            yield name, 0, tensor.flatten()


def _by_rows(tensor: DTensor) -> bool:
    """Whether the tensor is split by its first dimension, among the ranks of one dimension of its mesh, and otherwise copied."""
    split = [placement for placement in tensor.placements if not placement.is_replicate()]
    return len(split) == 1 and type(split[0]) is Shard and split[0].dim == 0


def _own_rows(tensor: DTensor) -> tuple[int, Tensor]:
    """Returns the number of the first value, and the values; none on ranks that hold copies of another's."""
    place = tensor.device_mesh.get_coordinate()
    local = tensor.to_local().detach().flatten()
    copied = [at for at, placement in zip(place or (), tensor.placements, strict=True) if placement.is_replicate()]
    if any(copied):
        return 0, local[:0]
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * (tensor.numel() // tensor.shape[0]), local
