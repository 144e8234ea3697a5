"""Mixtures of experts: who is chosen, and the products of each expert with the rows that chose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from headrace.engine.native.families import Experts, Routing
from headrace.engine.native.linear import Matrix
from headrace.engine.native.padding import EXACT_ROWS, in_pieces

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[n, 2 * inner] -> [n, inner]: the gate's activation times up."""


@dataclass(frozen=True)
class Choice:
    """What the router said, and the N * K assignments sorted by expert."""

    experts: torch.Tensor
    """[N, K] int64, best first."""
    weights: torch.Tensor
    """[N, K] float32"""
    order: torch.Tensor
    """[N * K] the assignments (token * K + place) by expert, tokens in order within one."""
    counts: torch.Tensor
    """[E] rows of each expert."""


def route(x: torch.Tensor, router: torch.Tensor, routing: Routing) -> Choice:
    """x [N, H], router [E, H]. Scores and softmax in float32: in bfloat16 neighbours would tie."""
    weights, experts = linear(x.float(), router).softmax(-1).topk(routing.chosen, dim=-1)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    assigned = experts.flatten()
    counts = torch.zeros(routing.experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, assigned, torch.ones_like(assigned))
    return Choice(experts, weights, assigned.argsort(stable=True), counts)


class Mixture:
    """The experts of one layer, ready to multiply."""

    def __init__(self, experts: Experts, routing: Routing, activation: Activation, pack: bool, exact: bool) -> None:
        self.router, self.routing, self._activation, self._exact = experts.router, routing, activation, exact
        self._stacked = None if not _groups(experts.down) else (experts.gate_up.mT, experts.down.mT)
        self._single: list[tuple[Matrix, Matrix]] = []
        if self._stacked is None:
            pairs = zip(experts.gate_up, experts.down, strict=True)
            self._single = [(Matrix((gate_up, None), pack), Matrix((down, None), pack)) for gate_up, down in pairs]

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """x [N, H] -> [N, H] float32: the chosen experts' outputs, weighted and added best first."""
        chosen = choice.experts.shape[1]
        rows = x[choice.order // chosen]
        sorted_out = self._grouped(rows, choice.counts) if self._stacked else self._one_by_one(rows, choice.counts)
        out = torch.empty_like(sorted_out, dtype=torch.float32)
        out[choice.order] = sorted_out.float()
        return (out.view(len(x), chosen, -1) * choice.weights[..., None]).sum(1)

    def _grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert self._stacked is not None
        ends = counts.cumsum(0).to(torch.int32)
        hidden = self._activation(torch.nn.functional.grouped_mm(rows, self._stacked[0], offs=ends))
        return torch.nn.functional.grouped_mm(hidden, self._stacked[1], offs=ends)

    def _one_by_one(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        out, start = torch.empty_like(rows), 0
        for (gate_up, down), count in zip(self._single, counts.tolist(), strict=True):
            if count:
                mine = slice(start, start + count)
                out[mine] = self._expert(gate_up, down, rows[mine])
                start += count
        return out

    def _expert(self, gate_up: Matrix, down: Matrix, rows: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return down(self._activation(gate_up(x)))

        return in_pieces(run, rows, EXACT_ROWS) if self._exact else run(rows)


def _groups(weight: torch.Tensor) -> bool:
    """Whether torch multiplies all experts at once: bfloat16 on GPUs since Ampere. On a CPU it loops, as we do, but without
    packed weights."""
    available = hasattr(torch.nn.functional, "grouped_mm") and weight.dtype == torch.bfloat16
    return available and weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
