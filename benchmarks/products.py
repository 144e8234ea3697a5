"""How fast are our products compared with torch's, on each kind of processor that this one can emulate?

    python benchmarks/products.py [--rounds 5] [--tiers native,skylake-avx512,haswell] [--rows 1,4,16,64,256] [--shapes 576x1536]

One thread, measured in CPU time, so that a busy host matters little; rounds are interleaved, and each figure is the
median of its rounds. Torch runs in a process of its own for each tier, in which oneDNN and ATen are limited to the same
instructions. (MKL, which computes torch's float32 products, chooses by itself: on AMD's processors it does not use
AVX-512.) Our product is that of the engine's kernels: bfloat16 weights, widened to float32 if no instruction multiplies
them, and float32 weights.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from ctypes import byref
from pathlib import Path
from statistics import median
from typing import Any

import torch

from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.runner import SIDE, Packer, padded
from headrace.native.build import LIMIT
from headrace.native.memory import zeros

SHAPES = {
    "576x1536": "gate, up",
    "576x960": "q, k, v",
    "1536x576": "down",
    "576x49152": "head",
    "896x4864": "0.5B gate",
}
THEIRS = {
    "haswell": ("avx2", "AVX2"),
    "skylake-avx512": ("avx512", "AVX512_CORE"),
    "cooperlake": ("avx512", "AVX512_CORE_BF16"),
}
"""Names of a tier in ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA."""
WORK = 4e8
"""Least number of floating-point operations of one measurement."""


def blocks(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Lays out rows [N, k] as the kernels need them: [N / 32][k / 32][32][32]."""
    whole = zeros(padded(len(x)) * padded(x.shape[1]), dtype).view(padded(len(x)), padded(x.shape[1]))
    whole[: len(x), : x.shape[1]] = x
    return whole.view(-1, SIDE, padded(x.shape[1]) // SIDE, SIDE).transpose(1, 2).contiguous()


def ours(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    library = binding.library(dtype=str(dtype).removeprefix("torch."))
    packer = Packer(library, dtype)
    linear = packer.linear((weight.to(dtype), None))
    rows = blocks(x, torch.bfloat16 if library.headrace_taken_bytes() == 2 else torch.float32)
    c = zeros(padded(len(x)) * padded(len(weight)), torch.float32)
    run = lambda: library.headrace_product(rows.data_ptr(), len(x), byref(linear), c.data_ptr())  # noqa: E731
    run()
    got = c.view(-1, padded(len(weight)) // SIDE, SIDE, SIDE).transpose(1, 2).reshape(padded(len(x)), -1)
    expected = x.to(rows.dtype).double() @ weight.to(dtype).double().T
    assert (got[: len(x), : len(weight)] - expected).abs().max() < 1e-3 * expected.abs().max(), "the product is wrong"
    run.kept = packer  # type: ignore[attr-defined]
    return run


def theirs(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    x, weight = x.to(dtype), weight.to(dtype)
    return lambda: torch.nn.functional.linear(x, weight)


def measure(shape: str, rows: int, rounds: int) -> list[float]:
    """Returns GFLOP per CPU-second of torch in float32, torch in bfloat16, our kernels with float32 weights, and with
    bfloat16 weights."""
    inputs, outputs = map(int, shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    runs = [make(x, weight, dtype) for make in (theirs, ours) for dtype in (torch.float32, torch.bfloat16)]
    work = 2.0 * rows * inputs * outputs
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, seconds in zip(runs, times, strict=True):
            run()
            begin = time.process_time()
            for _ in range(count := max(1, int(WORK / work))):
                run()
            seconds.append((time.process_time() - begin) / count)
    return [work / median(seconds) / 1e9 for seconds in times]


def table(given: argparse.Namespace) -> None:
    print(f"\n**{binding.tier()}**\n")
    print(
        "| shape | rows | torch float32 | torch bfloat16 | ours, float32 weights | ours, bfloat16 weights | best of ours / best of torch |"
    )
    print("|---|---|---|---|---|---|---|")
    for shape in given.shapes.split(","):
        for rows in map(int, given.rows.split(",")):
            if rows > 64 and shape.endswith("x49152"):
                continue  # no more rows of logits are asked for
            figures = measure(shape, rows, given.rounds)
            ratio = max(figures[2:]) / max(figures[:2])
            print(
                f"| {shape} | {rows} | " + " | ".join(f"{figure:.0f}" for figure in figures) + f" | **{ratio:.2f}** |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiers", default="native,skylake-avx512,haswell")
    parser.add_argument("--rows", default="1,4,8,16,32,64,256")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--here", action="store_true", help="one tier, in this process")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.here:
        table(given)
        return
    for tier in given.tiers.split(","):
        limits = {} if tier == "native" else {LIMIT: tier}
        if tier in THEIRS:
            limits |= dict(zip(("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"), THEIRS[tier], strict=True))
        command = [sys.executable, str(Path(__file__).resolve()), "--here", "--rounds", str(given.rounds)]
        subprocess.run(
            [*command, "--rows", given.rows, "--shapes", given.shapes], env={**os.environ, **limits}, check=True
        )


if __name__ == "__main__":
    main()
