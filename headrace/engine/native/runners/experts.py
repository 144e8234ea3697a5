"""Mixtures of experts: the choice of experts, and the products of each expert with the rows that chose it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from headrace.engine.native.runners.families import Experts, Routing
from headrace.engine.native.runners.linear import Matrix
from headrace.engine.native.runners.padding import EXACT_ROWS, in_pieces

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[n, 2 * inner] -> [n, inner]: the gate's activation times up."""


@dataclass(frozen=True)
class Choice:
    """The router's choice, and the N * K assignments of tokens to experts."""

    experts: torch.Tensor
    """[N, K] int64, best first."""
    weights: torch.Tensor
    """[N, K] float32"""


def route(x: torch.Tensor, router: torch.Tensor, routing: Routing) -> Choice:
    """x [N, H], router [E, H]. Scores and softmax in float32: in bfloat16 neighbours would tie."""
    weights, experts = linear(x.float(), router).softmax(-1).topk(routing.chosen, dim=-1)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(experts, weights)


class Stack:
    """Matrices [E, out, in] of all experts, ready to multiply."""

    def __init__(self, weight: torch.Tensor, pack: bool, exact: bool) -> None:
        self._exact = exact
        self._stacked = weight.mT if _groups(weight) else None
        self._single = [] if self._stacked is not None else [Matrix((matrix, None), pack) for matrix in weight]

    @property
    def static(self) -> bool:
        return self._stacked is not None

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """rows [n, in], those of expert 0 first, `counts` [E] of each -> [n, out]"""
        if self._stacked is not None:
            return torch.nn.functional.grouped_mm(rows, self._stacked, offs=counts.cumsum(0).to(torch.int32))
        parts = zip(self._single, rows.split(counts.tolist()), strict=True)
        return torch.cat([self._product(matrix, mine) for matrix, mine in parts if len(mine)])

    def _product(self, matrix: Matrix, rows: torch.Tensor) -> torch.Tensor:
        return in_pieces(matrix, rows, EXACT_ROWS) if self._exact else matrix(rows)


@dataclass(frozen=True)
class ExpertPair:
    """A LoRA adapter of every expert: x -> b(a(x)), the scale in b."""

    a: Stack
    b: Stack


@dataclass(frozen=True)
class Adapted:
    """An adapter of the layer's experts, and the tokens [start, stop) that use it."""

    gate_up: ExpertPair | None
    down: ExpertPair | None
    start: int
    stop: int


class Mixture:
    """The experts of one layer."""

    def __init__(self, experts: Experts, routing: Routing, activation: Activation, pack: bool, exact: bool) -> None:
        self.router, self.routing, self._activation = experts.router, routing, activation
        self._gate_up, self._down = Stack(experts.gate_up, pack, exact), Stack(experts.down, pack, exact)

    @property
    def static(self) -> bool:
        """Whether no shape depends on the choice."""
        return self._gate_up.static and self._down.static

    def __call__(self, x: torch.Tensor, choice: Choice, adapted: Sequence[Adapted] = ()) -> torch.Tensor:
        """x [N, H] -> [N, H] float32: the chosen experts' outputs, weighted and added best first."""
        assigned = choice.experts.flatten()
        order = assigned.argsort(stable=True)
        tokens, experts = order // self.routing.chosen, assigned[order]
        rows, counts = x[tokens], self._counts(experts)
        hidden = self._gate_up(rows, counts)
        mine = [((tokens >= part.start) & (tokens < part.stop)).nonzero()[:, 0] for part in adapted]
        for part, places in zip(adapted, mine, strict=True):
            self._add(part.gate_up, hidden, rows, experts, places)
        hidden = self._activation(hidden)
        out = self._down(hidden, counts)
        for part, places in zip(adapted, mine, strict=True):
            self._add(part.down, out, hidden, experts, places)
        back = torch.empty_like(out, dtype=torch.float32)
        back[order] = out.float()
        return (back.view(*choice.experts.shape, -1) * choice.weights[..., None]).sum(1)

    def _add(
        self,
        pair: ExpertPair | None,
        out: torch.Tensor,
        rows: torch.Tensor,
        experts: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        if pair is not None and len(places):
            counts = self._counts(experts[places])
            out.index_add_(0, places, pair.b(pair.a(rows[places], counts), counts))

    def _counts(self, experts: torch.Tensor) -> torch.Tensor:
        """[E] how often each occurs. (`bincount` would make a GPU wait.)"""
        counts = torch.zeros(self.routing.experts, dtype=torch.int64, device=experts.device)
        return counts.scatter_add_(0, experts, torch.ones_like(experts))


def _groups(weight: torch.Tensor) -> bool:
    """Whether torch multiplies all experts at once: bfloat16 on GPUs since Ampere, rows of 16 bytes. On a CPU it loops, as we
    do, but without packed weights."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    aligned = weight.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0
    return aligned and torch.cuda.get_device_capability(weight.device) >= (8, 0)
