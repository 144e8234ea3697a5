"""Weights in the dtype that autocast lowers them to: which ones it lowers, and copies of them that serve a whole step.

Autocast lowers every float32 weight anew in each of its contexts, and each microbatch has one (`placement/port.py`). Where a weight stays where it
is, one copy serves all microbatches between two updates: 6 bytes a parameter less to read and write for each microbatch after the first.
While it is in use, the copy stands in the weight's place in its module. It is made by the operation that autocast would use, so that its
gradient goes to the float32 weight through the same operation too: the same bits. Compiled layers (`forward/compiled.py`) rely on it,
because autocast's own copies do not outlive a compiled call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


Place = tuple[torch.nn.Module, str, torch.nn.Parameter]
"""A module, the name of a parameter in it, and the parameter."""


@contextmanager
def _replaced(places: Sequence[Place], by: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within this context the modules have what `by` makes of their parameters."""
    try:
        for module, name, parameter in places:  # in its place, so that names keep their order
            module._parameters[name] = by(parameter)  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


@dataclass(frozen=True)
class StepCopies:
    """Copies of trained float32 weights, for as long as no weight is updated."""

    places: tuple[Place, ...]
    dtype: torch.dtype

    def used(self) -> AbstractContextManager[None]:
        """Within this context the modules multiply by the copies. 2 bytes a parameter, which are free again at its end."""
        return _replaced(self.places, lambda parameter: parameter.to(self.dtype))


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
    """Tried with weights that are not what `dtype` holds. Those of a model that was published in bfloat16 are, until their first update: a rounded one
    would not show."""
    device, vocabulary = forward.model.device, forward.model.get_input_embeddings().weight.shape[0]
    pack = pack_sequence([7919 * place % vocabulary for place in range(1, 14)]).to(device)

    def logprobs(weight: Callable[[Tensor], Tensor]) -> Tensor:
        with computed_in(copies.dtype, device), _replaced(copies.places, weight):
            return forward.logprobs(pack, 1.0, copies.dtype).logprob

    expected = logprobs(_unrounded)
    try:
        return torch.equal(logprobs(lambda weight: _unrounded(weight).to(copies.dtype)), expected)
    except RuntimeError:  # float32 times a copy, where the model switches autocast off
        return False


def _unrounded(weight: Tensor) -> Tensor:
    """A float32 weight, moved by at most 1/512 of each value: about the rounding of bfloat16."""
    return weight * (1 + torch.linspace(-1, 1, weight.shape[-1], device=weight.device) / 512)
