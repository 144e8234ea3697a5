"""What ranks compute with layers that torch.compile has written. A piece of work of a rank is a function of this module, so that every process finds it."""

from __future__ import annotations

from pathlib import Path

import torch
from sharded_case import Case, Gradients, gradients, trainer_of_rank

from headrace.trainer.forward.compiled import compiled


def compiled_gradients(directory: Path, case: Case, backend: str) -> tuple[str, int, list[str], Gradients, Gradients]:
    """Returns why nothing was compiled, the graphs made after the trial, the names that are published, and the gradients of eager and of compiled layers."""
    torch._dynamo.reset()
    made = trainer_of_rank(directory, case)
    before = gradients(made, case)
    found = compiled(made._forward, made._dtype, made._copies_of_step, backend, made._placement.largest)
    made._forward, made._compilation = found.forward, found
    after = gradients(made, case)
    graphs, _ = found.news()
    return found.why_not, graphs, [name for name, _ in made.parameters()], before, after
