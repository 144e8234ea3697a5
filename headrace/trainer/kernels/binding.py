"""The trainer's kernels: compiled for this machine (`native/build.py`), and called through the C++ structs of `src/linear.h` and its neighbours."""

from __future__ import annotations

import sys
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from headrace.core.printing import echo
from headrace.models.resolve import cache_dir
from headrace.native.build import Built, compiled, functions_of

# --- The trainer's kernels, compiled for this machine (`native/build.py`).
#
# python -m headrace.trainer.kernels.binding        compiles now (`make demo` and `make setup` do) and prints the result


SOURCE = Path(__file__).parent / "src"


@cache
def built(instructions: str = "native") -> Built:
    """Never raises: without kernels the trainer is slower, not wrong. `instructions`: as the compiler calls a set of them."""
    return compiled(SOURCE / "training.cpp", cache_dir() / "kernels", instructions)


# --- The functions of the library
# The functions of the library, and the C++ structs of `src/linear.h`, `src/attention.h` and `src/experts.h`, field by field.


class Weight(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("across", "down", "bias", "y", "gradient", "onto", "thin", "low")),
        *((name, c_int32) for name in ("n", "add", "wide", "ranks")),
    ]


class Trees(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("tokens", "segments", "heads", "kv_heads", "dim", "window")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("start", "length", "parent")),
    ]


class MixtureStruct(Structure):
    _fields_ = [
        *(
            (name, c_int32)
            for name in ("rows", "hidden", "inner", "experts", "chosen", "gelu", "add_gate_up", "add_down")
        ),
        *((name, c_void_p) for name in ("which", "weights", "gate_up", "down", "gate", "up", "y")),
        *((name, c_void_p) for name in ("by_gate_up", "by_down", "told")),
    ]


_POINTERS = POINTER(Weight)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "headrace_begin": (c_int, []),
    "headrace_tier": (c_char_p, []),
    "headrace_threads": (None, [c_int]),
    "headrace_pack_weight": (None, [c_int, c_void_p, c_int, c_int, c_void_p, c_void_p]),
    "headrace_linear": (None, [c_int, c_void_p, c_int, c_int, _POINTERS, c_int]),
    "headrace_linear_input_gradient": (None, [c_int, c_void_p, c_int, c_int, _POINTERS, c_int]),
    "headrace_linear_weight_gradient": (None, [c_int, c_void_p, c_int, c_int, _POINTERS, c_int]),
    "headrace_linear_gated": (None, [c_void_p, c_int, c_int, _POINTERS, _POINTERS, c_void_p, c_int]),
    "headrace_log_probabilities": (
        None,
        [c_int, c_void_p, c_int, c_int, c_void_p, c_int, c_float, *[c_void_p] * 6, c_int64, *[c_void_p] * 4],
    ),
    "headrace_norm": (None, [c_int, c_int, *[c_void_p] * 4, c_int, c_int, c_float, c_float, c_void_p]),
    "headrace_norm_backward": (None, [c_int, c_int, *[c_void_p] * 7, c_int, c_int, c_float]),
    "headrace_gated": (None, [c_int, *[c_void_p] * 3, c_int64, c_int]),
    "headrace_gated_backward": (None, [c_int, *[c_void_p] * 5, c_int64, c_int]),
    "headrace_rotary": (None, [c_int, *[c_void_p] * 5, c_int, c_int, c_int, c_float, c_float, c_int]),
    "headrace_rotary_backward": (None, [c_int, *[c_void_p] * 8, c_int, c_int, c_int, c_float, c_float]),
    "headrace_attention": (None, [c_int, POINTER(Trees), *[c_void_p] * 5]),
    "headrace_attention_backward": (None, [c_int, POINTER(Trees), *[c_void_p] * 9]),
    "headrace_router_scores": (None, [c_int, c_void_p, c_int, c_int, c_void_p, c_int, c_void_p]),
    "headrace_choose": (None, [c_void_p, *[c_int] * 5, c_void_p, c_void_p]),
    "headrace_experts": (None, [c_int, POINTER(MixtureStruct), c_void_p, c_void_p]),
    "headrace_experts_backward": (None, [c_int, POINTER(MixtureStruct), *[c_void_p] * 4]),
}


@cache
def library(instructions: str = "native") -> Any | None:
    """The functions, or None if there are no kernels (`binding.built().reason` says why)."""
    return functions_of(built(instructions).library, _SIGNATURES)


def tier(instructions: str = "native") -> str | None:
    """The kind of processor that the kernels are made for, such as AVX2; None where they cannot run."""
    functions = library(instructions)
    return functions.headrace_tier().decode() if functions else None


if __name__ == "__main__":
    found = built()
    echo(f"training kernels: {found.reason}" + ("" if found.library else "; PyTorch's own are used, which is slower"))
    sys.exit(0)
