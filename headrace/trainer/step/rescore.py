"""What a training step would compute for rows, before its update: for the parity report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.packing import pack_rows
from headrace.protocols import TrainerCore
from headrace.trainer.step.trainer import TorchTrainer
from headrace.types import Row


@torch.no_grad()
def rescore(trainer: TrainerCore, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """For each row, [T] log-probs of its tokens at `temperature`, with its sampling mask and recorded experts if it has them.

    Row after row: which rows share a microbatch is none of this report's business.
    """
    assert isinstance(trainer, TorchTrainer)
    return [_of_row(trainer, row, temperature) for row in rows]


def _of_row(trainer: TorchTrainer, row: Row, temperature: float) -> list[float]:
    budget = len(row.prompt) + len(row.tokens)
    (pack,) = pack_rows([row], lambda counts, _: [1.0] * len(counts), 0, budget, step=0, share=False).packs
    device, dtype = trainer._device, trainer._dtype
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        there = pack.to(device)
        with trainer._replay(there):
            return trainer._forward.logprobs(there, temperature, dtype).logprob.tolist()
