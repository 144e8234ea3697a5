"""The log-probs that a training step would compute for rows before its update: for the parity report."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.packing import pack_rows
from headrace.protocols import TrainerCore
from headrace.trainer.step.trainer import TorchTrainer
from headrace.types import Row


def rescore(trainer: TrainerCore, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """[T] log-probs of the tokens of each row at `temperature`, under its sampling mask and recorded experts where it has them.

    Every row has a microbatch of its own: the report must not depend on which rows share one.
    """
    assert isinstance(trainer, TorchTrainer)
    return [_of_row(trainer, row, temperature) for row in rows]


def _of_row(trainer: TorchTrainer, row: Row, temperature: float) -> list[float]:
    budget = len(row.prompt) + len(row.tokens)
    (pack,) = pack_rows(
        [row], lambda counts, _: [1.0] * len(counts), constant=0, budget=budget, step=0, share=False
    ).packs
    return trainer.logprobs(pack, temperature)
