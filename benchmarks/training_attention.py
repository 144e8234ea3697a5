"""How fast is the trainer's attention over long rows, compared with PyTorch's?

    python benchmarks/training_attention.py [--tokens 512 2048 8192] [--dtype float32] [--rounds 3]

One causal row, forward and backward pass, in the shape of SmolLM2-135M (9 heads over 3 of keys, of 64), on one thread.
PyTorch is `scaled_dot_product_attention`, which TRL's models take. Figures are seconds of CPU time, the least of several
interleaved rounds, and GFLOP a CPU second of the two products forward and the five backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.trainer.forward.fused import fused_ops
from headrace.trainer.kernels import binding
from headrace.trainer.packing.pack import Segment

HEADS, KV_HEADS, DIM = 9, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = binding.library()
    assert kernels is not None, "no compiler"
    kernels.headrace_threads(1)
    print(f"{binding.tier()}, {options.dtype}")
    print(
        "| tokens | forward, s | backward, s | forward, GFLOP/s | backward, GFLOP/s | PyTorch forward, s | backward, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for tokens in options.tokens:
        print(row(tokens, getattr(torch, options.dtype), options.rounds), flush=True)


def row(tokens: int, dtype: torch.dtype, rounds: int) -> str:
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    segments = fused_ops.Segments.of([Segment(0, tokens, -1)])

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused_ops.attention(q.float(), k.float(), v, segments, scale=DIM**-0.5)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    found = [(9e9, 9e9), (9e9, 9e9)]
    for _ in range(rounds):
        for place, work in enumerate((ours, theirs)):
            found[place] = tuple(map(min, found[place], timed(work, q, k, v)))  # type: ignore[assignment]
    products = HEADS * DIM * tokens * (tokens + 1) * 1e-9
    mine, torchs = found
    rates = 2 * products / mine[0], 5 * products / mine[1]
    cells = [*(f"{seconds:.3f}" for seconds in mine), *(f"{rate:.0f}" for rate in rates)]
    return f"| {tokens:,} | {' | '.join(cells)} | {torchs[0]:.3f} | {torchs[1]:.3f} |"


def timed(work: Callable[..., Tensor], *given: Tensor) -> tuple[float, float]:
    """CPU seconds of (the forward pass, the backward pass). The process's: autograd has a thread of its own."""
    inputs = [x.clone().requires_grad_() for x in given]
    begun = time.process_time()
    out = work(*inputs)
    between = time.process_time()
    out.backward(torch.ones_like(out))
    return between - begun, time.process_time() - between


if __name__ == "__main__":
    main()
