"""Compiles the kernels that read pages down to machine code, by Triton's own assembler; nothing is run: python -m support.compile_page_kernels
CAPABILITY CAPPED ROWS QUERIES SPLIT DIM, all as numbers."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.runners import page_kernels


def main(capability: int, capped: int, rows: int, queries: int, split: int, dim: int) -> None:
    numbers = {"scale": "fp32", "cap": "fp32", "sinks": "*bf16"} | dict.fromkeys(
        ("tiles", "starts", "lengths", "tables"), "*i32"
    )
    halves = dict.fromkeys(("q", "keys", "values"), "*bf16") | {"logs": "*fp32", "parts": "*fp32"}
    shape = {"DIM": dim, "WIDTH": dim, "SPLITS": split, "SUNK": bool(capped)}
    attend = shape | {
        "KV_HEADS": 2,
        "GROUP": 3,
        "QUERIES": queries,
        "ROWS": rows,
        "STEP": 32 if dim > 128 else 64,
        "PAGE": BLOCK,
        "CAPPED": bool(capped),
    }
    launches = [(page_kernels._attend, attend, "*fp32" if split > 1 else "*bf16")]
    if split > 1:
        launches.append((page_kernels._merge, shape | {"HEADS": 6, "SPLITS_WIDE": split}, "*bf16"))
    for function, constants, out in launches:
        types = numbers | halves | {"out": out} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            fn=function,
            signature={name: types.get(name, "i32") for name in function.arg_names},
            constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        )
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert len(made.asm["cubin"]) > 1000 and made.metadata.shared < 100_000


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
