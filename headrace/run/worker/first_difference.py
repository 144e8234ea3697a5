"""Finds the first layer in which the forward passes of engine and trainer differ, by running both over one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.core.errors import IdentityError
from headrace.core.protocols import TrainerCore
from headrace.engine.native.kernels import runner as engine
from headrace.run.worker.worker_messages import TrainerStart
from headrace.trainer.step import trainer as trainer
from headrace.trainer.step.bitwise import UnequalLogprobs


def explained(error: IdentityError, core: TrainerCore, start: TrainerStart, adapter: str = "") -> IdentityError:
    """Adds the first layer that differs to an error about unequal log-probs. Other errors are returned unchanged. `adapter`: the one that
    was to be trained."""
    if not isinstance(error, UnequalLogprobs):
        return error
    try:
        where = first_difference(core, Path(start.model_dir), start.serving_dtype, error.tokens, adapter=adapter)
    except Exception as failure:  # the run stops anyway; its first error must not be lost
        where = f"The layer could not be determined ({type(failure).__name__}: {failure})"
    return IdentityError(f"{error}. {where}.")


def first_difference(
    core: TrainerCore, model_dir: Path, dtype: str, tokens: Sequence[int], *, adapter: str = ""
) -> str:
    """A sentence that names the first layer whose result differs, under the trainer's current weights. `dtype`: the serving dtype.

    The engine's pass is repeated in this process, without its cache, batch and memory. If nothing differs here, one of these is the cause.
    """
    context = tokens[:-1]
    trained = next(((spec, core.parameters(adapter)) for spec in core.adapters() if spec.name == adapter), None)
    weights = engine.ServedWeights(model_dir, core.parameters(), getattr(torch, dtype), trained)
    theirs, token, logprob = engine.residual_stream(weights, context)
    ours = trainer.residual_stream(core, context)
    for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if not torch.equal(one, other):
            where = f"layer {index - 1}" if index else "the embedding"
            return f"Over this sequence the two forward passes first differ in {where}: {_size(one, other)}"
    if core.score([*context, token], adapter)[-1] != logprob:
        return "Over this sequence all layers give the same bits: the two forward passes differ in the final norm or the head"
    return (
        "Over this sequence both forward passes give the same bits in every layer when the engine's is repeated: the difference arose in "
        "the process that served it (its cache, its batch, its memory)"
    )


def _size(tensor: torch.Tensor, other: torch.Tensor) -> str:
    gap = (tensor - other).abs()
    return f"{int((gap != 0).sum())} of {gap.numel()} numbers differ, by {float(gap.max()):.3g} at most"
