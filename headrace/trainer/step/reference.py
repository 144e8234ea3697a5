"""The reference model of the KL term: what the weights were before the run, or what they are without their adapters.

Full training keeps a frozen copy. Its matrices lie in the dtype of the computation, to which autocast would lower them anyway:
2 bytes a parameter under bfloat16, and as long as no weight has moved the log-probs equal the policy's bit for bit. Under LoRA
the reference is the same model with the adapters switched off, which costs no memory.

It is made before a checkpoint is restored: after a resume it is still the model that the run started from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.packing import Pack
from headrace.trainer.forward.forward import Forward
from headrace.trainer.forward.routing import RoutingReplay, no_replay


@dataclass(frozen=True)
class Reference:
    """`reference(pack, temperature)` -> [M] log-probs of the pack's targets, without gradient.

    Same temperature, sampling mask and recorded experts as the policy's; under the caller's autocast.
    """

    forward: Forward
    dtype: torch.dtype
    """Of the computation."""
    switch: Callable[[], AbstractContextManager[Any]]
    """While it computes."""
    replay: Callable[[Pack], AbstractContextManager[Any]]
    bytes: int
    """Of its own weights."""

    @torch.no_grad()
    def __call__(self, pack: Pack, temperature: float) -> Tensor:
        untaught = replace(pack, top_ids=None, top_logprobs=None)
        with self.switch(), self.replay(pack):
            return self.forward.logprobs(untaught, temperature, self.dtype).logprob


def reference_of(forward: Forward, dtype: torch.dtype, keep_routing: bool = False) -> Reference:
    """Of a model as it is now, in evaluation mode: with adapters, the model without them; otherwise a frozen copy.

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
    except ImportError:  # then nobody can have put any there
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


# -- a copy -----------------------------------------------------------------------------------------------------------------


def frozen(model: Any, dtype: torch.dtype) -> Any:
    """A copy in evaluation mode that gives the same numbers under autocast to `dtype`."""
    lowered = _lowered_by_autocast(model)
    embedding = model.get_input_embeddings()
    raised = type(embedding) is torch.nn.Embedding and _survives(embedding.weight, dtype)
    if not raised:
        lowered.discard(id(embedding.weight))
    memo: dict[
        int, Any
    ] = {}  # deepcopy takes a parameter's copy from here, so that there is never a second one in float32
    for parameter in model.parameters():
        low = id(parameter) in lowered or (raised and parameter is embedding.weight)
        value = parameter.detach().to(dtype if low else parameter.dtype, copy=True)
        memo[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
    copied = copy.deepcopy(model, memo).eval()
    if (
        raised and dtype != embedding.weight.dtype
    ):  # autocast leaves embeddings alone: what follows is summed in float32
        original = embedding.weight.dtype
        copied.get_input_embeddings().register_forward_hook(lambda module, args, output: output.to(original))
    return copied


def _lowered_by_autocast(model: Any) -> set[int]:
    """Ids of parameters that enter matrix products under autocast: of linear layers, and stacked experts one by one.

    transformers' grouped products of experts know no autocast.
    """
    lowered = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    if getattr(model.config, "_experts_implementation", "eager") == "eager":
        lowered |= {id(p) for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}
    return lowered


def _survives(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether nothing is lost: most models are published in bfloat16."""
    return bool((weight.to(dtype).to(weight.dtype) == weight).all())
