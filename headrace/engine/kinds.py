"""The kinds of engines, a line each: a value of `engine.kind` and its class."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.core.protocols import EngineCore

ENGINES = {
    "native": "headrace.engine.native.core:NativeEngine",
}
"""A class of protocol `EngineCore` that is made of a model's directory, an `EngineConfig`, and whether it begins asleep. By name,
because only the process that serves it imports it."""


SERVERS = ("headrace", "vllm", "sglang")
"""Engines behind HTTP: values of `engine.kind` that need `engine.urls`. Their dialects are in `remote/`."""


COPIES_TIED = ("vllm",)
"""Servers that may multiply by a copy of their own of a tied parameter, which they make anew only when it is sent under its own name: vLLM
packs weights for the products of a CPU, and its reload goes module by module (vLLM 0.32, `model_loader/reload/layerwise.py`)."""


OWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "mixtral", "olmoe")
"""Values of `model_type` whose forward pass the native engine has itself. Only beside these it serves adapters."""


def core_class(kind: str) -> Callable[[Path, Any, bool], EngineCore]:
    module, _, name = ENGINES[kind].partition(":")
    found: Callable[[Path, Any, bool], EngineCore] = getattr(importlib.import_module(module), name)
    return found
