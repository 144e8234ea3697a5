"""Weights in the dtype that autocast lowers them to: which ones it lowers, and copies of them that serve a whole step.

Autocast lowers every float32 weight anew in each of its contexts, and each microbatch has one (`placement/port.py`). Where a weight stays where it
is, one copy serves all microbatches between two updates: 6 bytes a parameter less to read and write for each microbatch after the first.
While it is in use, the copy stands in the weight's place in its module. It is made by the operation that autocast would use, so that its
gradient goes to the float32 weight through the same operation too: the same bits. Compiled layers (`forward/compiled.py`) rely on it,
because autocast's own copies do not outlive a compiled call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.trainer.forward.forward import Forward
from headrace.trainer.model.causal_lm import computed_in
from headrace.trainer.packing import pack_sequence


def lowered_by_autocast(model: Any) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Yields what autocast lowers, as module, name in it, and parameter: weights of linear layers, and stacked experts unless
    transformers multiplies them in groups, which autocast does not reach. A tied matrix comes once for each place where it is multiplied by."""
    eager = getattr(model.config, "_experts_implementation", "eager") == "eager"
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight: Any = module.weight
            yield module, "weight", weight
        elif eager and path.endswith(".experts"):
            yield from ((module, name, p) for name, p in module.named_parameters(recurse=False) if p.ndim == 3)


@dataclass(frozen=True)
class StepCopies:
    """Copies of trained float32 weights, for as long as no weight is updated."""

    places: tuple[tuple[torch.nn.Module, str, torch.nn.Parameter], ...]
    dtype: torch.dtype

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within this context the modules multiply by the copies. 2 bytes a parameter, which are free again at its end."""
        try:
            for module, name, parameter in self.places:  # in its place, so that names keep their order
                module._parameters[name] = parameter.to(self.dtype)  # type: ignore[assignment]
            yield
        finally:
            for module, name, parameter in self.places:
                module._parameters[name] = parameter


def step_copies(forward: Forward, dtype: torch.dtype) -> StepCopies:
    """Copies of the weights that are trained in float32 and computed with in `dtype`; none where this is float32 too. Tried on a few tokens:
    a model that takes a weight out of autocast's reach somewhere would be computed with a rounded one, and gets no copies."""
    places = tuple(
        (module, name, parameter)
        for module, name, parameter in lowered_by_autocast(forward.model)
        if parameter.requires_grad and parameter.dtype == torch.float32
    )
    copies, none = StepCopies(places, dtype), StepCopies((), dtype)
    return none if dtype == torch.float32 or not places or not _same_numbers(forward, copies) else copies


@torch.no_grad()
def _same_numbers(forward: Forward, copies: StepCopies) -> bool:
    device, vocabulary = forward.model.device, forward.model.get_input_embeddings().weight.shape[0]
    pack = pack_sequence([7919 * place % vocabulary for place in range(1, 14)]).to(device)
    with computed_in(copies.dtype, device):
        expected = forward.logprobs(pack, 1.0, copies.dtype).logprob
    with computed_in(copies.dtype, device), copies.used():
        return torch.equal(forward.logprobs(pack, 1.0, copies.dtype).logprob, expected)
