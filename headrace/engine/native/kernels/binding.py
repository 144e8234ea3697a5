"""The C++ structs of `src/decoder.h`, field by field, and the functions of the library."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

from headrace.engine.native.kernels.build import built


class Linear(Structure):
    _fields_ = [("packed", c_void_p), ("bias", c_void_p), ("n", c_int32), ("k", c_int32)]


class LayerStruct(Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "after_attention", "mlp_norm", "after_mlp", "q_norm", "k_norm")),
        ("window", c_int32),
        ("rotary", c_int32),
        ("scale", c_float),
        *((name, c_int32) for name in ("whole_norm", "experts", "chosen", "normalise_chosen", "mixture")),
        ("router", c_void_p),
    ]


class LowRank(Structure):
    _fields_ = [("a", c_void_p), ("b", c_void_p), ("rank", c_int64)]


class ModelStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inter", "vocabulary")),
        ("gelu", c_int32),
        ("mixtures", c_int32),
        ("eps", c_float),
        ("embed_scale", c_float),
        ("embed", c_void_p),
        ("layer", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("head", Linear),
        ("cos", c_void_p * 2),
        ("sin", c_void_p * 2),
    ]


class Cache(Structure):
    _fields_ = [("data", c_void_p), ("blocks", c_int64)]


class PassStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("tokens_count", "segments", "width", "rows_count", "slots")),
        *((name, c_void_p) for name in ("tokens", "starts", "context", "tables", "rows", "adapters")),
        ("low_rank", POINTER(LowRank)),
        ("logits", c_void_p),
        ("routing", c_void_p),
        ("broken", c_void_p),
        ("stream", c_void_p),
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
    "headrace_draw": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_int64, *[c_void_p] * 4]),
    "headrace_score": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_int64, *[c_void_p] * 5]),
}


@cache
def library(instructions: str = "native", dtype: str = "bfloat16") -> Any | None:
    """The functions over weights and cache of `dtype`, or None if there are no kernels (`build.built().reason` says why).
    ctypes releases the GIL in a call, so messages are read and weights prepared during a pass."""
    path = built(instructions, dtype).library
    if path is None:
        return None
    functions = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions if functions.headrace_begin() else None


def tier(instructions: str = "native") -> str | None:
    """The kind of processor that the kernels are made for, such as AVX2; None where they cannot run."""
    functions = library(instructions)
    return functions.headrace_tier().decode() if functions else None
