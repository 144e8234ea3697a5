"""The residual stream of one sequence through the kernels, to find the layer from which on a trainer computes something else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.core.weights import AdapterSpec
from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.kernels.runner import KernelRunner
from headrace.engine.native.runners import skeleton

Parameters = Iterable[tuple[str, Tensor]]
"""Names and tensors, as a trainer publishes them."""


@dataclass(frozen=True)
class ServedWeights:
    """Weights that a runner is made for, and served with."""

    model_dir: Path
    parameters: Parameters
    dtype: torch.dtype
    """The serving dtype."""
    adapter: tuple[AdapterSpec, Parameters] | None = None

    def runner(self, length: int) -> KernelRunner:
        """A runner for one sequence of `length` tokens; an adapter is in its slot 0."""
        model = skeleton.read(self.model_dir, self.dtype, torch.device("cpu"))
        slots = int(self.adapter is not None)
        runner = KernelRunner(model, length, dtype=self.dtype, device=torch.device("cpu"), max_adapters=slots)
        runner.allocate(-(-length // BLOCK))
        runner.use(runner.prepare(self._published(self.parameters)))
        if self.adapter is not None:
            spec, tensors = self.adapter
            runner.use_adapter(0, runner.prepare_adapter(spec, self._published(tensors)))
        return runner

    def _published(self, parameters: Parameters) -> dict[str, Tensor]:
        return {name: parameter.detach().to(self.dtype) for name, parameter in parameters}


def residual_stream(weights: ServedWeights, tokens: Sequence[int]) -> tuple[Tensor, int, float]:
    """([layers + 1, T, H] float32: the embeddings, then the result of each layer; the most probable next token; its log-prob)."""
    count = len(tokens)
    runner = weights.runner(count)
    batch = ForwardInput(
        tokens=np.array(tokens, np.int64),
        starts=np.array([0, count], np.int32),
        context=np.zeros(1, np.int32),
        tables=np.arange(-(-count // BLOCK), dtype=np.int32)[None],
        rows=np.array([count - 1], np.int64),
        adapters=np.full(1, 0 if weights.adapter else -1, np.int32),
    )
    stream = torch.empty(len(runner.spec.layers) + 1, count, runner.spec.hidden)
    draw = runner.forward(batch, stream).draw
    assert draw is not None
    (token,), (logprob,) = draw(np.zeros(1), np.zeros(1), None)
    return stream, int(token), float(np.float32(logprob))
