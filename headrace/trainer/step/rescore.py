"""What a training step would compute, before its update: for the parity report, and to find where it differs from an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.packing import pack_rows, pack_sequence
from headrace.protocols import TrainerCore
from headrace.trainer.forward.forward import packed_hidden
from headrace.trainer.forward.tree_attention import tree_of
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
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            packed_hidden(model, pack.tokens, pack.positions, tree_of(pack.segments, device))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def _states(result: Any) -> Tensor:
    return (result[0] if isinstance(result, tuple) else result)[0].float()
