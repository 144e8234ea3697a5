"""The kinds of engines, a line each: a value of `engine.kind` and its class."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.protocols import EngineCore
from headrace.engine.own_families import SURE_FAMILIES


@dataclass(frozen=True)
class CoreKind:
    """Facts about an engine in a worker's process."""

    opens: str
    """Place of a class of protocol `EngineCore` that is made of a model's directory, an `EngineConfig`, and whether it begins asleep. By name,
    because only the process that serves it imports it."""
    about: str
    """Half a sentence that says what it is, for the page of settings."""
    families: tuple[str, ...] = ()
    """Values of `model_type` whose forward pass it has itself, wherever it runs. Only beside these it serves adapters of experts."""
    repeated: bool = False
    """Whether the trainer repeats that forward pass bit for bit (`train.parity`)."""


OTHERS_PATHS = ("hf", "cache")
"""Values of `engine.path` that serve them through transformers' forward pass."""

ENGINES = {
    "native": CoreKind(
        "headrace.engine.native.core:NativeEngine",
        "headrace's own, in a process on this machine",
        families=SURE_FAMILIES,
        repeated=True,
    ),
}
"""Engines in a worker's process."""

SERVERS = {
    "headrace": "headrace.engine.remote.dialects.headrace:SERVER",
    "vllm": "headrace.engine.remote.dialects.vllm:SERVER",
    "sglang": "headrace.engine.remote.dialects.sglang:SERVER",
}
"""Engines behind HTTP: values of `engine.kind`, and the `ServerKind` of each, beside its dialect."""


def core_class(kind: str) -> Callable[[Path, Any, bool], EngineCore]:
    module, _, name = ENGINES[kind].opens.partition(":")
    found: Callable[[Path, Any, bool], EngineCore] = getattr(importlib.import_module(module), name)
    return found
