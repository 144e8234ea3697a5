"""Examples of clients as microbatches: each is a sequence of its own, and every position is in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headrace.trainer.packing import ROOT, Pack, Segment
from headrace.trainer.shared.calls import Example


@dataclass(frozen=True)
class ExampleRow:
    """An example as tensors."""

    tokens: Tensor
    """[N] int64"""
    targets: Tensor
    """[N, K] int64"""
    inputs: dict[str, Tensor]
    """[N] float32 each, or [N, K] where K > 1"""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """That of its log-probs: [N], or [N, K] where K > 1."""
        positions, width = self.targets.shape
        return (positions,) if width == 1 else (positions, width)


def row_of(example: Example) -> ExampleRow:
    tokens = np.frombuffer(example.tokens, np.int32).astype(np.int64)
    targets = np.frombuffer(example.targets, np.int32).astype(np.int64).reshape(len(tokens), example.width)
    shape = (len(tokens),) if example.width == 1 else targets.shape
    inputs = {name: torch.from_numpy(np.frombuffer(x, np.float32).copy()) for name, x in example.inputs.items()}
    return ExampleRow(
        torch.from_numpy(tokens), torch.from_numpy(targets), {name: x.view(shape) for name, x in inputs.items()}
    )


def check_rows(rows: Sequence[ExampleRow], vocabulary: int, context: int) -> None:
    """Raises ValueError for tokens that the model does not have, and sequences that are longer than it can see."""
    for number, row in enumerate(rows):
        for name, tokens in (("model_input", row.tokens), ("target_tokens", row.targets)):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocabulary:
                raise ValueError(
                    f"data[{number}] has the token {low if low < 0 else high} in {name}, and the model has 0 to {vocabulary - 1}"
                )
        if len(row.tokens) > context:
            raise ValueError(
                f"data[{number}] has {len(row.tokens)} tokens, and the model sees at most {context}; shorten it"
            )


def packs_of(rows: Sequence[ExampleRow], budget: int) -> Iterator[tuple[Pack, Sequence[ExampleRow]]]:
    """Yields microbatches of at most `budget` tokens (more where one row alone is longer), with their rows."""
    waiting: list[ExampleRow] = []
    for row in rows:
        if waiting and sum(len(one.tokens) for one in waiting) + len(row.tokens) > budget:
            yield _pack(waiting), waiting
            waiting = []
        waiting.append(row)
    if waiting:
        yield _pack(waiting), waiting


def _pack(rows: Sequence[ExampleRow]) -> Pack:
    lengths = [len(row.tokens) for row in rows]
    starts = np.cumsum([0, *lengths])
    places = [torch.arange(length) for length in lengths]
    predictor = [
        (place + int(start)).repeat_interleave(row.targets.shape[1])
        for row, place, start in zip(rows, places, starts, strict=False)
    ]
    count = sum(map(len, predictor))
    sequence = torch.cat([torch.full((len(one),), number) for number, one in enumerate(predictor)])
    return Pack(
        tokens=torch.cat([row.tokens for row in rows]),
        positions=torch.cat(places),
        segments=tuple(Segment(int(start), length, ROOT) for start, length in zip(starts, lengths, strict=False)),
        predictor=torch.cat(predictor),
        target=torch.cat([row.targets.flatten() for row in rows]),
        sampled=torch.zeros(count),
        advantage=torch.zeros(count),
        weight=torch.ones(count),
        sequence=sequence,
        row=sequence,
        lag=torch.zeros(count),
        swapped=torch.zeros(count, dtype=torch.bool),
        unmixed=torch.ones(count, dtype=torch.bool),
    )
