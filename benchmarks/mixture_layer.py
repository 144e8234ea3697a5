"""What does a mixture of experts cost in training, through the kernels and through Hugging Face's own modules?

    python benchmarks/mixture_layer.py [--rows 316 1024] [--rounds 9]

Forward and backward pass of one layer's router and experts in the shape of SmolLM2-135M with 4 experts, of which 2 are chosen, and in one with
many small experts. Seconds of CPU time on one thread, medians of rounds in turns; weights are packed anew in each, as after an optimizer step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from copy import deepcopy
from typing import Any

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from headrace.native.memory import keep_freed_memory
from headrace.trainer.forward.fused.fused_mixtures import fuse_mixtures

SHAPES = {"576 → 1,536, 2 of 4": (576, 1536, 4, 2), "1,024 → 256, 8 of 64": (1024, 256, 64, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[316, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| experts | rows | dtype | Hugging Face, one by one | grouped | kernels | of the better |")
    print("|---|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        for rows in options.rows:
            for dtype in (torch.bfloat16, torch.float32):
                eager, grouped, kernels = seconds(shape, rows, dtype, options.rounds)
                best = kernels / min(eager, grouped)
                print(
                    f"| {name} | {rows:,} | {str(dtype)[6:]} | {eager:.3f} | {grouped:.3f} | {kernels:.3f} | {best:.2f} |"
                )


def seconds(shape: tuple[int, ...], rows: int, dtype: torch.dtype, rounds: int) -> list[float]:
    hidden, inner, experts, chosen = shape
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=chosen
    )
    torch.manual_seed(0)
    eager = MixtralSparseMoeBlock(config).float()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    grouped, kernels = deepcopy(eager), deepcopy(eager)
    eager.experts.config._experts_implementation = "eager"
    grouped.experts.config._experts_implementation = "grouped_mm"
    assert len(fuse_mixtures(kernels)) == 2
    x, slope = torch.randn(1, rows, hidden).to(dtype).requires_grad_(), torch.randn(1, rows, hidden)
    found: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for block, into in zip((eager, grouped, kernels), found, strict=True):
            into.append(once(block, x, slope, dtype))
    return [statistics.median(one) for one in found]


def once(block: Any, x: torch.Tensor, slope: torch.Tensor, dtype: torch.dtype) -> float:
    for parameter in block.parameters():
        parameter.grad = None
        parameter.data.mul_(1)
        torch._C._autograd._unsafe_set_version_counter([parameter], [parameter._version + 1])
    x.grad, begin = None, time.process_time()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        y = block(x)
    y.backward(slope.to(y.dtype))
    return time.process_time() - begin


if __name__ == "__main__":
    main()
