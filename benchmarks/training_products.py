"""How fast are the trainer's products compared with MKL's and oneDNN's, on every kind of processor that this one can
emulate?

    python benchmarks/training_products.py [--tiers native AVX2] [--rows 256 1024] [--rounds 7]

y = x Wᵀ and both of its gradients, for the layers of SmolLM2-135M and one of a model of 0.5 billion parameters, in
float32 and bfloat16, on one thread. Figures are GFLOP per second of CPU time, the fastest of several interleaved
rounds. A tier is a process of its own in which kernels are compiled for a set of instructions and torch's libraries are
limited to the same. `packed` includes packing the weight first, as float32 does at every use; in the others the weight
is packed already, as in oneDNN's own measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.native.memory import address, zeros
from headrace.trainer.kernels import binding

TIERS: dict[str, tuple[str, dict[str, str]]] = {
    "native": ("native", {}),
    "AVX512-BF16": ("cooperlake", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    "AVX-512": ("skylake-avx512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}),
    "AVX2": (
        "haswell",
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
}
SHAPES = ((576, 1536), (576, 960), (1536, 576), (896, 4864))
SIDE = 32

Work = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=["native", "AVX-512", "AVX2"])
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 1024, 2048])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    if options.child:
        child(options.child, options.rows, options.dtypes, options.rounds)
        return
    print("| tier | dtype | rows | inputs → outputs | product | kernels | packed | torch | oneDNN | of the best |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for tier in options.tiers:
        instructions, limits = TIERS[tier]
        command = [sys.executable, __file__, *sys.argv[1:], "--child", json.dumps([tier, instructions])]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **limits}, check=True)


def child(told: str, rows: list[int], dtypes: list[str], rounds: int) -> None:
    tier, instructions = json.loads(told)
    torch.set_num_threads(1)
    kernels = binding.library(instructions)
    assert kernels is not None, "no compiler"
    kernels.headrace_threads(1)
    for name in dtypes:
        for count in rows:
            for k, n in SHAPES:
                for product, contenders in products(kernels, getattr(torch, name), count, k, n).items():
                    found = {who: 2e-9 * count * k * n / seconds for who, seconds in timed(contenders, rounds).items()}
                    cells = [
                        f"{found[who]:.0f}" if who in found else "" for who in ("kernels", "packed", "torch", "oneDNN")
                    ]
                    best = max(found[who] for who in ("torch", "oneDNN") if who in found)
                    place = f"{tier} | {name} | {count} | {k} → {n} | {product}"
                    print(f"| {place} | {' | '.join(cells)} | {found['kernels'] / best:.2f} |", flush=True)


def products(kernels: Any, dtype: torch.dtype, rows: int, k: int, n: int) -> dict[str, dict[str, Work]]:
    wide, size = dtype == torch.float32, -(-n // SIDE) * -(-k // SIDE) * SIDE * SIDE
    x, weight, slope = torch.randn(rows, k).to(dtype), torch.randn(n, k), torch.randn(rows, n).to(dtype)
    low, across, down = weight.to(dtype), zeros(size, dtype), zeros(size, dtype)
    y, d_x, d_weight = torch.empty(rows, n, dtype=dtype), torch.empty(rows, k, dtype=dtype), torch.empty(n, k)
    d_low = d_weight.to(dtype)

    def pack(across: Tensor | None, down: Tensor | None) -> None:
        kernels.headrace_pack_weight(wide, address(weight), n, k, address(across), address(down))

    pack(across, down)
    packed = {"across": address(across), "down": address(down), "n": n}
    forward = (binding.Weight * 1)(binding.Weight(**packed, y=address(y)))
    backward = (binding.Weight * 1)(binding.Weight(**packed, y=address(slope), gradient=address(d_weight)))

    def of(function: Any, array: Tensor, table: Any) -> Work:
        work = lambda: function(wide, address(array), rows, k, table, 1)  # noqa: E731
        work.kept = d_weight  # type: ignore[attr-defined]  # the tables hold its address alone
        return work

    product = of(kernels.headrace_linear, x, forward)
    to_input = of(kernels.headrace_linear_input_gradient, d_x, backward)
    made: dict[str, dict[str, Work]] = {
        "x Wᵀ": {
            "kernels": product,
            "packed": lambda: (pack(across, None), product()),
            "torch": lambda: torch.mm(x, low.t(), out=y),
        },
        "dy W": {
            "kernels": to_input,
            "packed": lambda: (pack(None, down), to_input()),
            "torch": lambda: torch.mm(slope, low, out=d_x),
        },
        "dyᵀ x": {
            "kernels": of(kernels.headrace_linear_weight_gradient, x, backward),
            "torch": lambda: torch.mm(slope.t(), x, out=d_low),
        },
    }
    own = one_dnn(x, low)
    if own:
        made["x Wᵀ"]["oneDNN"] = own
    return made


def one_dnn(x: Tensor, weight: Tensor) -> Work | None:
    """Its product with a weight that it has packed; None if it has none for this dtype."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
    except RuntimeError:
        return None
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def timed(contenders: dict[str, Work], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for who, work in contenders.items():
            began = time.thread_time()
            work()
            best[who] = min(best[who], time.thread_time() - began)
    return best


if __name__ == "__main__":
    main()
