"""Numbers of loss tokens, put back at the places that these tokens have in the rows of the batch. Rows are picked up to a budget of
tokens, because the journal keeps what is collected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.batches import Batch, Row
from headrace.core.reports import TokenNumbers
from headrace.trainer.packing.pack import Pack
from headrace.trainer.packing.plan import loss_places

MOST_TOKENS = 1 << 15
"""Tokens of a step whose numbers are recorded: 8 bytes each, a third more in the journal, which has about 80 bytes of every token."""


@dataclass(frozen=True)
class PickedRow:
    ticket: int
    number: int
    """Its place among the rows of its group."""
    start: int
    """The place of its first token among the tokens of all picked rows."""
    tokens: int
    losses: Tensor
    """[M] int64: places of its loss tokens among the tokens of all picked rows."""


class PickedNumbers:
    """The trainer's log-probs and entropies of the picked rows of one step, collected from microbatches and ranks.

    Rows are picked from the group `step` modulo the number of groups on, so that neither good nor bad, short nor long ones are favoured; the
    first one is picked whatever its length."""

    def __init__(self, batch: Batch, most: int = MOST_TOKENS) -> None:
        self._rows = dict(_pick(batch, most))
        """The rows by their numbers in the step."""
        total = sum(one.tokens for one in self._rows.values())
        self._values = torch.zeros(2, total, dtype=torch.float64)
        """[2, tokens of the picked rows] log-probs and entropies; 0 where another rank has them. Sums over ranks are exact."""

    def add(self, pack: Pack, logprob: Tensor, entropy: Tensor) -> None:
        """Takes the numbers [M] of a microbatch."""
        rows = pack.row.cpu()
        if not (here := [number for number in rows.unique().tolist() if number in self._rows]):
            return
        values = torch.stack([logprob.detach(), entropy.detach()]).cpu().double()
        for number in here:
            self._values[:, self._rows[number].losses] = values[:, rows == number]

    def combine(self, add: Callable[[Tensor], Tensor]) -> None:
        """Replaces the numbers of one rank by those of all. `add`: sums elementwise over the ranks."""
        self._values = add(self._values.flatten()).view(2, -1)

    def report(self) -> tuple[TokenNumbers, ...]:
        found = torch.full(self._values.shape, math.nan)
        for one in self._rows.values():
            found[:, one.losses] = self._values[:, one.losses].float()
        return tuple(
            TokenNumbers(
                one.ticket,
                one.number,
                *(values[one.start : one.start + one.tokens].numpy().tobytes() for values in found),
            )
            for one in self._rows.values()
        )


def _pick(batch: Batch, most: int) -> Iterator[tuple[int, PickedRow]]:
    start = 0
    for number, ticket, place, row in _in_turn(batch):
        if start and start + len(row.tokens) > most:
            return
        losses = torch.tensor(loss_places(row), dtype=torch.int64) + start
        yield number, PickedRow(ticket, place, start, len(row.tokens), losses)
        start += len(row.tokens)


def _in_turn(batch: Batch) -> Iterator[tuple[int, int, int, Row]]:
    """Yields the rows of the step from one of its groups on: number in the step, ticket, number in the group, row."""
    numbered, number = [], 0
    for group in batch.groups:
        numbered.append([(number + place, group.ticket, place, row) for place, row in enumerate(group.rows)])
        number += len(group.rows)
    first = batch.step % max(1, len(numbered))
    for rows in (*numbered[first:], *numbered[:first]):
        yield from rows
