"""The numbers that a training step would compute before its update: for the parity report, and to find where an engine's differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.core.batches import Row
from headrace.core.protocols import TrainerCore
from headrace.trainer.forward.forward import packed_hidden
from headrace.trainer.forward.tree_attention import tree_of
from headrace.trainer.model.causal_lm import computed_in
from headrace.trainer.packing import StepRows, pack_rows, pack_sequence
from headrace.trainer.step.trainer import TorchTrainer


def rescore(trainer: TrainerCore, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """[T] log-probs of the tokens of each row at its temperature (`temperature` if it does not say it), under its sampling mask and recorded experts where it has them.

    Every row has a microbatch of its own: the report must not depend on which rows share one.
    """
    assert isinstance(trainer, TorchTrainer)
    return [_of_row(trainer, row, temperature) for row in rows]


def _of_row(trainer: TorchTrainer, row: Row, temperature: float) -> list[float]:
    budget = len(row.prompt) + len(row.tokens)
    (pack,) = pack_rows(
        StepRows([row], lambda counts, _: [1.0] * len(counts), constant=0, budget=budget, step=0, share=False)
    ).packs
    return trainer.logprobs(pack, pack.temperature or temperature)


@torch.no_grad()
def residual_stream(trainer: TrainerCore, tokens: Sequence[int]) -> Tensor:
    """[layers + 1, T, H] float32 of one sequence: its embeddings, then the result of each layer."""
    assert isinstance(trainer, TorchTrainer)
    model, device, dtype = trainer._model, trainer._device, trainer._dtype
    found: list[Tensor] = []
    modules = [model.get_input_embeddings(), *model.base_model.layers]
    hooks = [module.register_forward_hook(lambda _, __, result: found.append(_states(result))) for module in modules]
    pack = pack_sequence((*tokens, tokens[-1])).to(device)  # the last one is only predicted
    try:
        with computed_in(dtype, device):
            packed_hidden(model, pack.tokens, pack.positions, tree_of(pack.segments, device))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def _states(result: Any) -> Tensor:
    return (result[0] if isinstance(result, tuple) else result)[0].float()
