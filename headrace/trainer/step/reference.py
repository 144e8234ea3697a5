"""The reference model of the KL term: the weights before the run, or the present ones without their adapters.

Full training keeps a frozen copy. Its matrices have the dtype of the computation, to which autocast would lower them anyway:
2 bytes a parameter under bfloat16, and log-probs that equal the policy's bit for bit until a weight moves. Under LoRA the reference
is the same model with its adapters switched off, which costs no memory.

The copy is made before a checkpoint is restored, so that a resumed run has the reference that it started with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.trainer.forward.forward import Forward
from headrace.trainer.forward.routing import RoutingReplay, no_replay
from headrace.trainer.model.frozen import frozen
from headrace.trainer.packing import Pack


@dataclass(frozen=True)
class Reference:
    """`reference(pack, temperature)` -> [M] log-probs of the pack's targets, without gradient.

    Temperature, sampling mask and recorded experts are those of the policy; the caller opens the autocast context.
    """

    forward: Forward
    dtype: torch.dtype
    """The dtype of the computation."""
    switch: Callable[[], AbstractContextManager[Any]]
    """Open while the reference computes: it switches adapters off."""
    replay: Callable[[Pack], AbstractContextManager[Any]]
    bytes: int
    """The size of the weights that it has of its own; 0 under LoRA."""

    @torch.no_grad()
    def __call__(self, pack: Pack, temperature: float) -> Tensor:
        untaught = replace(pack, top_ids=None, top_logprobs=None)
        with self.switch(), self.replay(pack):
            return self.forward.logprobs(untaught, temperature, self.dtype).logprob


def reference_of(forward: Forward, dtype: torch.dtype, keep_routing: bool = False) -> Reference:
    """The reference of a model as it is now, in evaluation mode: the same model without its adapters, or a frozen copy of one without any.

    Raises ConfigError when routes are to be replayed and cannot be.
    """
    switch: Callable[[], AbstractContextManager[Any]]
    adapters = adapter_layers(forward.model)
    if adapters:
        own, switch, size = forward, lambda: switched_off(adapters), 0
    else:
        own = replace(forward, model=frozen(forward.model, dtype))
        switch, size = nullcontext, sum(p.nbytes for p in own.model.parameters())

    return Reference(own, dtype, switch, RoutingReplay(own, dtype) if keep_routing else no_replay, size)


# -- without adapters -------------------------------------------------------------------------------------------------------


def adapter_layers(model: torch.nn.Module) -> list[Any]:
    """peft's layers in a model."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:  # without peft the model has none
        return []
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


@contextmanager
def switched_off(layers: list[Any]) -> Iterator[None]:
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
