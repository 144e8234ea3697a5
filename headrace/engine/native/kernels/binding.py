"""The engine's kernels: compiled for this machine (`native/build.py`), and called through the C++ structs of `src/decoder.h`."""

from __future__ import annotations

import sys
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from headrace.core.printing import echo
from headrace.models.resolve import cache_dir
from headrace.native.build import Built, compiled, functions_of

# --- The engine's kernels, compiled for this machine (`native/build.py`).
#
# python -m headrace.engine.native.kernels.binding        compiles now (`make demo` and `make setup` do) and prints the result


SOURCE = Path(__file__).parent / "src"


@cache
def built(instructions: str = "native", dtype: str = "bfloat16") -> Built:
    """Never raises: without kernels the engine is slower, not wrong. `instructions`: as the compiler calls a set of them.
    `dtype`: that weights and cache are stored in."""
    flags = ("-DWIDE",) if dtype == "float32" else ()
    return compiled(SOURCE / "decoder.cpp", cache_dir() / "kernels", instructions, flags)


# --- The C++ structs of `src/decoder.h`, field by field
# The C++ structs of `src/decoder.h`, field by field, and the functions of the library.


class Linear(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("packed", "bias")),
        *((name, c_int32) for name in ("n", "k")),
        *((name, c_void_p) for name in ("codes", "scales", "factors")),
    ]


class LayerStruct(Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *(
            (name, c_void_p)
            for name in (
                "input_norm",
                "after_attention",
                "mlp_norm",
                "after_mlp",
                "q_norm",
                "k_norm",
                "v_norm",
                "sinks",
            )
        ),
        ("window", c_int32),
        ("rotary", c_int32),
        *((name, c_float) for name in ("scale", "cap")),
        *((name, c_int32) for name in ("whole_norm", "kv_heads", "head_dim", "turned", "borrows")),
        ("cached", c_int64),
        *((name, c_int32) for name in ("experts", "chosen", "normalise_chosen", "mixture")),
        *((name, c_void_p) for name in ("router", "router_bias")),
        *((name, c_void_p) for name in ("convolution", "convolution_bias")),
        *((name, c_int32) for name in ("kernel", "place")),
        *((name, c_void_p) for name in ("decay", "step_bias", "result_norm", "skip")),
        *(
            (name, c_int32)
            for name in ("key_heads", "value_heads", "key_width", "value_width", "corrects", "gate_last")
        ),
        *((name, c_float) for name in ("shortest_step", "longest_step")),
        *((name, c_int32) for name in ("gated", "head_gated")),
        *((name, Linear) for name in ("shared_gate_up", "shared_down")),
        *((name, c_void_p) for name in ("shared_gate", "choice_bias")),
        ("sigmoid", c_int32),
        *((name, c_float) for name in ("chosen_scale", "chosen_least")),
        *((name, Linear) for name in ("per_layer_gate", "per_layer_out")),
        ("after_per_layer", c_void_p),
        ("scale_behind", c_float),
        *((name, Linear) for name in ("into_recurrence", "out_of_recurrence")),
    ]


class LowRank(Structure):
    _fields_ = [("a", c_void_p), ("b", c_void_p), ("rank", c_int64)]


class ModelStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "inter", "vocabulary")),
        *((name, c_int32) for name in ("activation", "mixtures", "neighbours", "centred", "parallel")),
        *(
            (name, c_float)
            for name in ("eps", "embed_scale", "residual_scale", "logit_cap", "clamp_alpha", "clamp_limit")
        ),
        ("embed", c_void_p),
        ("layer", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("head", Linear),
        ("cos", c_void_p * 2),
        ("sin", c_void_p * 2),
        ("query_factors", c_void_p),
        ("per_layer", c_int32),
        ("per_layer_embed", c_void_p),
        ("per_layer_into", Linear),
        ("per_layer_norm", c_void_p),
    ]


class Cache(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("data", "inputs")),
        ("blocks", c_int64),
        ("states", c_void_p),
        ("state_size", c_int64),
    ]


class PassStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("tokens_count", "segments", "width", "rows_count", "slots")),
        *((name, c_void_p) for name in ("tokens", "starts", "context", "tables", "rows", "adapters")),
        ("low_rank", POINTER(LowRank)),
        ("logits", c_void_p),
        ("routing", c_void_p),
        ("broken", c_void_p),
        *((name, c_void_p) for name in ("states", "kept")),
        ("kept_count", c_int32),
        ("stream", c_void_p),
    ]


class DrawsStruct(Structure):
    """`Draws` of `src/sampling.h`."""

    _fields_ = [
        *((name, c_int32) for name in ("count", "vocabulary", "listed", "width")),
        *((name, c_void_p) for name in ("logits", "rows", "temperature", "u", "top_k", "top_p", "min_p")),
        *((name, c_void_p) for name in ("masked", "tops", "left", "given")),
        *((name, c_void_p) for name in ("tokens", "logprobs", "kept", "top_ids", "top_logprobs")),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "headrace_begin": (c_int, []),
    "headrace_tier": (c_char_p, []),
    "headrace_taken_bytes": (c_int, []),
    "headrace_product": (None, [c_void_p, c_int, POINTER(Linear), c_void_p]),
    "headrace_open": (c_void_p, [POINTER(Cache), c_int]),
    "headrace_close": (None, [c_void_p]),
    "headrace_use": (None, [c_void_p, POINTER(ModelStruct)]),
    "headrace_forward": (None, [c_void_p, POINTER(PassStruct)]),
    "headrace_pack": (None, [c_void_p, c_int, c_void_p, c_int, c_void_p]),
    "headrace_quantise": (None, [c_void_p, c_void_p, c_int, POINTER(Linear)]),
    "headrace_draw": (None, [c_void_p, POINTER(DrawsStruct)]),
    "headrace_kept": (None, [c_void_p, c_void_p, c_int, c_void_p]),
}


@cache
def library(instructions: str = "native", dtype: str = "bfloat16") -> Any | None:
    """The functions over weights and cache of `dtype`, or None if there are no kernels (`binding.built().reason` says why).
    A call releases the GIL, so messages are read and weights prepared during a pass."""
    return functions_of(built(instructions, dtype).library, _SIGNATURES)


def tier(instructions: str = "native") -> str | None:
    """The kind of processor that the kernels are made for, such as AVX2; None where they cannot run."""
    functions = library(instructions)
    return functions.headrace_tier().decode() if functions else None


if __name__ == "__main__":
    for dtype in ("bfloat16", "float32"):
        found = built(dtype=dtype)
        remedy = "" if found.library else "; the engine runs in PyTorch, which is slower"
        echo(f"engine kernels, {dtype}: {found.reason}{remedy}")
    sys.exit(0)
