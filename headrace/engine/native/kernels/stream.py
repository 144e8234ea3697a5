"""The residual stream of one sequence through the kernels, to find the layer from which on a trainer computes something else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.engine.native.forward_pass import BLOCK, ForwardInput
from headrace.engine.native.kernels.runner import KernelRunner
from headrace.engine.native.runners import skeleton


def residual_stream(
    model_dir: Path, parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype, tokens: Sequence[int]
) -> tuple[Tensor, int, float]:
    """([layers + 1, T, H] float32: the embeddings, then the result of each layer; the most probable next token; its log-prob).

    `parameters`: as a trainer publishes them; they are served in `dtype`, by a runner made for this.
    """
    count, device = len(tokens), torch.device("cpu")
    model = skeleton.read(model_dir, dtype, device)
    runner = KernelRunner(model, count, dtype=dtype, device=device)
    blocks = -(-count // BLOCK)
    runner.allocate(blocks)
    served = {name: parameter.detach().to(dtype) for name, parameter in parameters}
    runner.use(runner.prepare(served))
    batch = ForwardInput(
        tokens=np.array(tokens, np.int64),
        starts=np.array([0, count], np.int32),
        context=np.zeros(1, np.int32),
        tables=np.arange(blocks, dtype=np.int32)[None],
        rows=np.array([count - 1], np.int64),
        adapters=np.full(1, -1, np.int32),
    )
    stream = torch.empty(len(runner.spec.layers) + 1, count, runner.spec.hidden)
    draw = runner.forward(batch, stream).draw
    assert draw is not None
    (token,), (logprob,) = draw(np.zeros(1), np.zeros(1), None)
    return stream, int(token), float(np.float32(logprob))
